// The leaderboard: filters that hold for the overview and the table, cells of means, and lines that open.
const KEYS = ["algorithm", "backend", "bits", "model"];
const board = document.getElementById("board");
const lines = Array.from(board.tBodies[0].rows);
const byId = new Map(record.rows.map((row) => [row.id, row]));
const picks = Object.fromEntries([...KEYS, "status"].map((key) => [key, document.getElementById(`by-${key}`)]));
// Points of drop at which the colour changes: the same for all widths, so that noise at 8 bits stays pale.
const STEPS = [0.25, 0.5, 1, 2, 5, 10];
const heat = (drop) => STEPS.filter((step) => drop >= step).length;
const told = (value, digits) => value.toFixed(digits).replace(/^-(0(\.0*)?)$/, "$1");  // no minus zero

const sorted = (values) => Array.from(new Set(values)).sort((a, b) => (typeof a === "number" ? b - a : a.localeCompare(b)));
const fits = (row) => KEYS.every((key) => !picks[key].value || String(row[key]) === picks[key].value)
  && (!picks.status.value || row.status === picks.status.value);

function spread(values) {
  const mean = values.reduce((sum, value) => sum + value, 0) / values.length;
  const squares = values.reduce((sum, value) => sum + (value - mean) ** 2, 0);
  return { mean, std: values.length > 1 ? Math.sqrt(squares / (values.length - 1)) : 0, count: values.length };
}

// Hundreds of lines are shown a part at a time; filters and sorting are over all of them.
const FEW = narrow.matches ? 20 : 60;
let most = FEW;
const more = document.getElementById("more");
function limit() {
  let left = most, hidden = 0;
  for (const line of board.tBodies[0].rows) {
    if (line.classList.contains("detail")) continue;
    line.hidden = !line.fits || left <= 0;
    if (line.detail) line.detail.hidden = line.hidden;
    if (line.fits) left -= 1;
    if (line.fits && line.hidden) hidden += 1;
  }
  more.hidden = !hidden;
  more.textContent = `Show ${Math.min(hidden, 5 * FEW)} more of ${hidden}`;
}
more.addEventListener("click", () => {
  const next = lines.length && Array.from(board.tBodies[0].rows).find((line) => line.fits && line.hidden);
  most += 5 * FEW;
  limit();
  if (next) next.querySelector(".opener").focus({ preventScroll: true });
});
board.addEventListener("sorted", limit);
board.closest(".scroll").classList.remove("long");  // it has few lines now
for (const line of lines) line.fits = true;

// Narrow screens sort by a list. What is better comes first.
const heads = Array.from(board.tHead.rows[0].cells).map((head) => head.textContent), sorter = document.getElementById("sort-by");
heads.forEach((head, column) => sorter.append(make("option", { value: column }, head)));
sorter.value = heads.indexOf("Drop");
sorter.addEventListener("change", () => sortBy(board, Number(sorter.value), heads[sorter.value] === "Accuracy"));

function update() {
  const chosen = record.rows.filter(fits);
  let shown = 0;
  most = FEW;
  for (const line of lines) {
    const good = KEYS.every((key) => !picks[key].value || line.dataset[key] === picks[key].value)
      && (!picks.status.value || line.dataset.status.split(" ").includes(picks.status.value));
    line.fits = good;
    shown += good ? 1 : 0;
  }
  limit();
  document.getElementById("shown").textContent = `${shown} of ${lines.length} lines, ${chosen.length} rows`;
  overview(chosen);
  const kept = Object.entries(picks).filter(([, pick]) => pick.value).map(([key, pick]) => [key, pick.value]);
  const query = new URLSearchParams(kept).toString();
  try {
    history.replaceState(null, "", query ? `#?${query}` : location.pathname.split("/").pop() || "#");
  } catch {
    // A page in a frame may not change its address; then filters aren't kept in it.
  }
}

// A table for each width: algorithms against backends, coloured by the mean drop.
function overview(chosen) {
  const place = document.getElementById("matrix");
  const algorithms = sorted(chosen.map((row) => row.algorithm)), backends = sorted(chosen.map((row) => row.backend));
  const tables = sorted(chosen.map((row) => row.bits)).map((bits) => {
    const head = make("tr", {}, make("th", { scope: "col" }, `${bits} bits`),
      ...[...backends, "all"].map((backend) => make("th", { scope: "col", class: "n" }, make("span", {}, backend))));
    const found = new Map();
    // A mean over all backends is over places that all algorithms have: who is refused where it is hard isn't better.
    const placeOf = (row) => [row.backend, row.model, row.seed].join("\n");
    const places = new Map();
    for (const row of chosen) if (row.bits === bits && typeof row.drop === "number") {
      places.set(placeOf(row), (places.get(placeOf(row)) || new Set()).add(row.algorithm));
    }
    const having = new Set(Array.from(places.values()).flatMap((names) => Array.from(names)));
    const cellOf = (algorithm, backend) => {
      const rows = chosen.filter((row) => row.bits === bits && row.algorithm === algorithm && (!backend || row.backend === backend));
      const counts = (row) => typeof row.drop === "number" && (backend || places.get(placeOf(row)).size === having.size);
      const drops = rows.filter(counts).map((row) => row.drop);
      return { rows, spread: drops.length ? spread(drops) : null };
    };
    for (const algorithm of algorithms) for (const backend of [...backends, null]) found.set(`${algorithm}\n${backend}`, cellOf(algorithm, backend));
    const body = algorithms.map((algorithm) => make("tr", {}, make("th", { scope: "row" }, make("code", {}, algorithm)),
      ...[...backends, null].map((backend) => {
        const one = found.get(`${algorithm}\n${backend}`);
        if (!one.spread) {
          const states = sorted(one.rows.map((row) => row.status)).join(", ");
          const why = sorted(one.rows.map((row) => row.reason || "").filter(Boolean)).join("; ");
          return make("td", { class: "n none", "data-tip": why || null }, states || "–");
        }
        const { mean, std, count } = one.spread, label = `${algorithm}, ${backend || "all backends"}, ${bits} bits`;
        const wide = count > 1 ? ` ± ${std.toFixed(2)}` : "";
        const press = make("button", {
          type: "button", class: `heat q${heat(mean)}`,
          "aria-label": `${label}: drop ${told(mean, 2)}${wide}`, "data-tip": `${label}: ${told(mean, 2)}${wide} points, ${count} ${count === 1 ? "row" : "rows"}`,
        }, make("b", {}, told(mean, 1)), count > 1 ? make("span", { class: "std" }, ` ± ${std.toFixed(1)}`) : "");
        press.addEventListener("click", () => {
          picks.algorithm.value = algorithm;
          picks.bits.value = String(bits);
          if (backend) picks.backend.value = backend;
          update();
          document.getElementById("results").scrollIntoView();
        });
        return make("td", { class: "n" }, press);
      })));
    return make("div", { class: "scroll", role: "region", tabindex: "0", "aria-label": `Drop at ${bits} bits` },
      make("table", { class: "matrix", style: `--n: ${backends.length + 1}` }, make("thead", {}, head), make("tbody", {}, ...body)));
  });
  place.replaceChildren(...(tables.length ? tables : [make("p", { class: "note" }, "No row matches these filters.")]));
}

board.addEventListener("click", (event) => {
  const opener = event.target.closest(".opener");
  if (opener) toggle(opener.closest("tr"));
});
function toggle(line) {
  const opener = line.querySelector(".opener"), open = opener.getAttribute("aria-expanded") !== "true";
  opener.setAttribute("aria-expanded", open);
  if (!open) {
    line.detail.remove();
    line.detail = undefined;
    return;
  }
  const rows = line.dataset.ids.split(" ").map((id) => byId.get(id)).filter(Boolean);
  line.detail = make("tr", { class: "detail" }, make("td", { colspan: line.cells.length }, ...rows.map(one)));
  line.after(line.detail);
}

const number = (value, digits = 2) => (typeof value === "number" ? value.toFixed(digits) : "–");
function one(row) {
  const items = [["State", row.reason ? `${row.status}: ${row.reason}` : row.status]];
  if (typeof row.accuracy === "number") items.push(["Accuracy", `${number(row.accuracy)} %, float ${number(row.float_accuracy)} %${
    typeof row.float_trained === "number" ? ` (${number(row.float_trained)} % after the same training)` : ""}, ${row.samples} samples`]);
  if (row.device) {
    const kinds = row.device.kinds ? `; ran as ${Object.entries(row.device.kinds).filter(([, n]) => n).map(([kind, n]) => `${n} ${kind}`).join(", ")}` : "";
    items.push([`On ${row.device.runtime}`, typeof row.device.accuracy === "number"
      ? `${number(row.device.accuracy)} %, gap ${number(row.device.gap)}${kinds}` : row.device.reason || "not measured"]);
  }
  if (row.executed) {
    const sites = (group) => group.map((s) => `${s.sites} × ${s.quantizer.split(".").pop()}, ${s.format}, ${s.levels} levels`).join("; ") || "none";
    items.push(["Executed, weights", sites(row.executed.weights)], ["Executed, activations", sites(row.executed.activations)]);
    const ranges = (found) => Object.entries(found).map(([name, n]) => `${n} × ${name.split(".").pop()}`).join(", ");
    if (row.observers) items.push(["Ranges by", `weights: ${ranges(row.observers.weights)}; activations: ${ranges(row.observers.activations)}`]);
    const folding = Object.entries(row.executed.folding || {}).map(([strategy, n]) => `${n} norms by strategy ${strategy}`).join(", ");
    items.push(["Folding", folding || "norms are not folded"]);
    const left = Object.entries(row.executed.kept_float || {}).map(([name, why]) => `${name}: ${why}`).join("; ");
    if (left) items.push(["In float", left]);
  }
  if (row.beyond) items.push(["Beyond the backend", row.beyond]);
  if (row.notes && row.notes.length) items.push(["Notes", row.notes.join("; ")]);
  if (typeof row.minutes === "number") items.push(["Took", `${number(row.minutes)} minutes${row.machine ? ` on ${row.machine}` : ""}${row.finished ? `, ${row.finished}` : ""}`]);
  const list = make("dl", {}, ...items.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]));
  const link = make("a", { href: `#${row.id}`, title: "A link to this row" }, make("code", {}, row.id));
  const report = row.report ? [make("p", {}, make("a", { class: "report", href: row.report }, "Report: plan with reasons, ranges, graph"))] : [];
  const config = make("details", { class: "config" }, make("summary", {}, "Config, as YAML: runs this row again"), make("pre", {}, row.yaml),
    make("a", { download: `${row.id}.yaml`, href: `data:text/yaml;charset=utf-8,${encodeURIComponent(row.yaml)}` }, "Download"));
  return make("article", { id: row.id }, make("h3", {}, `Seed ${row.seed} `, link), ...report, list, ...sites(row), config, ...(row.status === "done" ? [again(row)] : []));
}

// A short report of the row, if its complete report isn't next to the page.
function sites(row) {
  if (!row.sites || !row.sites.length) return [];
  const heads = [["Site"], ["Format"], ["Range", "n"], ["Clipped", "n"], ["SQNR", "n"]];
  const line = ([name, format, low, high, clipped, sqnr]) => make("tr", {},
    make("td", {}, make("code", {}, name)), make("td", {}, make("code", {}, format)), make("td", { class: "n" }, `${low} … ${high}`),
    make("td", { class: "n" }, typeof clipped === "number" ? `${told(100 * clipped, 2)} %` : "–"),
    make("td", { class: "n" }, typeof sqnr === "number" ? `${sqnr.toFixed(1)} dB` : "–"));
  const table = make("table", {}, make("thead", {}, make("tr", {}, ...heads.map(([name, kind]) => make("th", { scope: "col", class: kind || null }, name)))),
    make("tbody", {}, ...row.sites.map(line)));
  const worst = row.sites.filter((site) => typeof site[5] === "number").sort((a, b) => a[5] - b[5])[0];
  const title = `Sites: ${row.sites.length}${worst ? `; most is lost at ${worst[0]}, ${worst[5].toFixed(1)} dB` : ""}`;
  const place = make("div", { class: "scroll", role: "region", tabindex: "0", "aria-label": `Sites of ${row.id}` }, table);
  return [make("details", { class: "sites" }, make("summary", {}, title), place)];
}

function again(row) {
  const command = `bitwright bench ${record.results} --row ${row.id} --reports reports`;
  return make("p", { class: "note" }, row.report ? "Run this row again: " : "Create the complete report of this row from its config and seed: ", make("code", {}, command));
}

// An address may name a row, which is opened, or filters, which are set.
function follow() {
  const wanted = decodeURIComponent(location.hash.slice(1));
  if (wanted.startsWith("?")) {
    for (const [key, value] of new URLSearchParams(wanted.slice(1))) if (picks[key]) picks[key].value = value;
    return;
  }
  const line = wanted && lines.find((other) => other.dataset.ids.split(" ").includes(wanted));
  if (!line) return;
  if (line.hidden) {
    most = lines.length;
    limit();
  }
  if (!line.detail) toggle(line);
  document.getElementById(wanted).scrollIntoView();
}
for (const pick of Object.values(picks)) pick.addEventListener("change", update);
document.getElementById("clear").addEventListener("click", () => {
  for (const pick of Object.values(picks)) pick.value = "";
  update();
});
addEventListener("hashchange", () => { if (!location.hash.startsWith("#?")) follow(); });
document.getElementById("legend").append("points lost: ", ...[0, ...STEPS].map((step, index) => make("span", {}, make("i", { class: `q${index}` }), index ? `from ${step}` : "less")));
// Sections that an address or a cell leads to stop under the filters, however high these are.
const bar = document.getElementById("filters");
new ResizeObserver(() => document.documentElement.style.setProperty("--filters", `${bar.offsetHeight + 8}px`)).observe(bar);
limit();
follow();
overview(record.rows.filter(fits));
if (location.hash.startsWith("#?")) update();
else document.getElementById("shown").textContent = `${lines.length} lines, ${record.rows.length} rows`;
