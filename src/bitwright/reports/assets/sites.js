// The plan's table: filters, and rows that open. A histogram is drawn when its row is opened, not before.
const siteTable = document.getElementById("site-table");
if (siteTable) {
  const rows = Array.from(siteTable.tBodies[0].rows);
  const heads = Array.from(siteTable.tHead.rows[0].cells).map((head) => head.textContent);
  const search = document.getElementById("filter");
  const byPort = document.getElementById("by-port"), byFormat = document.getElementById("by-format");
  const texts = new Map();  // made at the first filter: opening the page shouldn't wait for it
  const text = (row) => {
    if (!texts.has(row)) texts.set(row, row.textContent.toLowerCase());
    return texts.get(row);
  };
  function filter() {
    const wanted = search.value.trim().toLowerCase().split(/\s+/);
    let shown = 0;
    for (const row of rows) {
      const fits = wanted.every((word) => text(row).includes(word))
        && (!byPort.value || row.dataset.port === byPort.value)
        && (!byFormat.value || row.dataset.format === byFormat.value);
      row.hidden = !fits;
      if (row.detail) row.detail.hidden = !fits;
      shown += fits ? 1 : 0;
    }
    document.getElementById("shown").textContent = `${shown} of ${rows.length}`;
  }
  search.addEventListener("input", filter);
  byPort.addEventListener("change", filter);
  byFormat.addEventListener("change", filter);

  // Narrow screens hide the heads: they sort by a list.
  const sorter = document.getElementById("sort-by");
  sorter.append(make("option", { value: "" }, "as planned"));
  heads.forEach((head, column) => sorter.append(make("option", { value: column }, head)));
  const planned = rows.slice();
  sorter.addEventListener("change", () => {
    if (sorter.value === "") siteTable.tBodies[0].append(...planned.flatMap((row) => (row.detail ? [row, row.detail] : [row])));
    else sortBy(siteTable, Number(sorter.value), ["Clipped", "Output error"].includes(heads[sorter.value]));
  });

  siteTable.addEventListener("click", (event) => {
    const opener = event.target.closest(".opener");
    if (opener) toggle(opener.closest("tr"), opener);
  });
  function toggle(row, opener) {
    const open = opener.getAttribute("aria-expanded") !== "true";
    opener.setAttribute("aria-expanded", open);
    if (!open) {
      row.detail.remove();
      row.detail = undefined;
      return;
    }
    const site = record.sites[Number(opener.dataset.n)];
    row.detail = make("tr", { class: "detail" }, make("td", { colspan: heads.length }, inside(site)));
    row.after(row.detail);
  }
}

const short = (value) => (value === null || value === undefined ? "–" : Number(value.toPrecision(3)).toString());
const percent = (value) => (value === null || value === undefined ? "–" : value > 0 && value < 1e-5 ? "< 0.001 %" : `${short(100 * value)} %`);

function inside(site) {
  const items = [
    ["Grid", `${short(site.low)} … ${short(site.high)}`],
    ["Numbers seen", site.seen_low === null ? "not recorded" : `${short(site.seen_low)} … ${short(site.seen_high)}`],
    ["Clipped", percent(site.clipped)],
    ["SQNR", site.sqnr_db === null ? "–" : `${site.sqnr_db.toFixed(1)} dB`],
    ["Scales", site.scales === 1 ? short(site.scale_min) : `${site.scales}: ${short(site.scale_min)} … ${short(site.scale_max)}`],
    ["Range by", site.observer], ["Arithmetic", site.quantizer],
  ];
  if (site.guard) items.push(["Guard", site.guard]);
  if (site.share) items.push(["Grid shared with", site.share]);
  const scored = record.sensitivity && record.sensitivity.sites.find((one) => one.site === site.site);
  if (scored) {
    items.push(["Quantized alone", `outputs change by ${percent(scored.output_error)}`]);
    if (scored.loss_change !== null) items.push(["", `the loss by ${short(scored.loss_change)}`]);
  }
  items.push(["Why", site.why]);
  const list = make("dl", {}, ...items.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]));
  const words = "No histogram: this run was told to make none, or no number reached the site.";
  return make("div", { class: "inside" }, site.histogram ? histogram(site) : make("p", { class: "note" }, words), list);
}

// Counts on a logarithmic scale: the tails are what is clipped, and a ReLU's zeros would hide everything else.
function histogram(site) {
  const { low, high, counts } = site.histogram, height = 164, base = 122;
  const most = Math.log1p(Math.max(...counts, 1)), width = 100 / counts.length, step = (high - low) / counts.length;
  const label = `Histogram of the numbers at ${site.site}: ${percent(site.clipped)} clipped`;
  const drawing = make("svg", { class: "histogram", height, role: "img", "aria-label": label });
  counts.forEach((count, index) => {
    if (!count) return;
    const start = low + index * step, end = start + step;
    const out = start + step / 2 < site.low || start + step / 2 > site.high;
    const tall = Math.max(1.5, 104 * Math.log1p(count) / most);
    drawing.append(make("rect", {
      class: out ? "bin out" : "bin", x: `${(index * width + 0.1).toFixed(3)}%`, width: `${(width - 0.2).toFixed(3)}%`,
      y: (base - tall).toFixed(1), height: tall.toFixed(1), "data-tip": `${short(start)} … ${short(end)}: ${count}`,
    }));
  });
  drawing.append(make("line", { class: "tick", x1: "0", x2: "100%", y1: base + 0.5, y2: base + 0.5 }));
  // Ends of the grid that are drawn; further out, the ends of what was seen are told.
  const ends = [[site.low, "start"], [site.high, "end"]].filter(([value]) => value >= low && value <= high);
  if (site.seen_low !== null && site.seen_low < low) drawing.append(make("text", { svg: true, class: "soft", x: "0", y: base + 36 }, `← from ${short(site.seen_low)}`));
  if (site.seen_high !== null && site.seen_high > high) drawing.append(make("text", { svg: true, class: "soft", x: "100%", y: base + 36, "text-anchor": "end" }, `to ${short(site.seen_high)} →`));
  if (!ends.length) {
    for (const [value, x, anchor] of [[low, "0", "start"], [high, "100%", "end"]]) {
      drawing.append(make("text", { svg: true, class: "soft", x, y: base + 19, "text-anchor": anchor }, short(value)));
    }
  }
  for (const [value, anchor] of ends) {
    const at = `${(100 * (value - low) / (high - low)).toFixed(2)}%`;
    drawing.append(make("line", { class: "edge", x1: at, x2: at, y1: 4, y2: base + 6 }));
    drawing.append(make("text", { svg: true, class: "soft", x: at, y: base + 19, "text-anchor": anchor }, short(value)));
  }
  const middle = make("text", { svg: true, class: "soft", x: "50%", y: base + 36, "text-anchor": "middle" }, ends.length ? "between the lines: the grid; counts on a log scale" : "the grid is far wider; counts on a log scale");
  drawing.append(middle);
  return drawing;
}
