// The model's graph as a heat map: levels run from left to right and wrap like text, so any width will do.
const place = document.getElementById("network");
if (place) {
  const nodes = record.graph, byName = new Map(nodes.map((node) => [node.name, node]));
  const operatorOf = (site) => site.slice(0, site.lastIndexOf(":"));
  const group = (rows) => {
    const found = new Map();
    for (const row of rows) {
      const operator = operatorOf(row.site);
      if (!found.has(operator)) found.set(operator, []);
      found.get(operator).push(row);
    }
    return found;
  };
  const sites = group(record.sites), scores = group(record.sensitivity ? record.sensitivity.sites : []);
  const kept = new Map(record.float_operators.map((row) => [row.operator, row.why]));
  const without = (name) => {
    if (kept.has(name)) return `in float: ${kept.get(name)}`;
    return name in record.folds ? `folded into ${record.folds[name]}` : "no quantizer of its own";
  };
  const bits = (site) => Number((site.format.match(/\d+/) || [32])[0]);
  const worst = (rows, value, choose) => {
    const known = (rows || []).map(value).filter((one) => one !== null && one !== undefined);
    return known.length ? choose(...known) : null;
  };
  const decimals = (value) => `${value.toPrecision(3)}`;
  // How each measure is read, which end is bad, and how it is told.
  const measures = {
    loss_change: { of: (node) => worst(scores.get(node.name), (one) => one.loss_change, Math.max), floor: 0, root: true, tell: decimals },
    output_error: { of: (node) => worst(scores.get(node.name), (one) => one.output_error, Math.max), floor: 0, root: true, tell: (v) => percent(v) },
    sqnr_db: { of: (node) => worst(sites.get(node.name), (one) => one.sqnr_db, Math.min), low: true, tell: (v) => `${v.toFixed(1)} dB` },
    clipped: { of: (node) => worst(sites.get(node.name), (one) => one.clipped, Math.max), floor: 0, root: true, tell: (v) => percent(v) },
    bits: { of: (node) => worst(sites.get(node.name), bits, Math.min), low: true, tell: (v) => `${v} bits` },
    macs: { of: (node) => node.macs || null, floor: 0, root: true, tell: (v) => v.toLocaleString("en") },
  };
  const CLASSES = 7;
  const picker = document.getElementById("measure"), legend = document.getElementById("legend");
  const dense = nodes.length > 160;
  const cell = dense ? { w: 15, h: 15, x: 24, y: 23 } : { w: 80, h: 24, x: 96, y: 38 };
  let chosen = null, boxes = new Map();

  function draw() {
    const room = Math.max(place.clientWidth - 16, 4 * cell.x), columns = Math.max(3, Math.floor(room / cell.x));
    const lanes = [];  // how many each row of levels needs
    for (const node of nodes) {
      const row = Math.floor(node.level / columns);
      lanes[row] = Math.max(lanes[row] || 1, node.lane + 1);
    }
    const tops = [];
    let height = dense ? 6 : 14;
    lanes.forEach((count, row) => { tops[row] = height; height += count * cell.y + (dense ? 10 : 18); });
    const at = (node) => {
      const row = Math.floor(node.level / columns);
      return { row, x: (node.level % columns) * cell.x + 4, y: tops[row] + node.lane * cell.y };
    };
    const drawing = make("svg", { width: columns * cell.x, height, role: "group", "aria-label": "The model's operators" });
    const wires = make("g", { "aria-hidden": "true" });
    drawing.append(wires);
    const right = columns * cell.x - 1;
    for (const node of nodes) {
      const end = at(node);
      for (const name of node.inputs) {
        const producer = byName.get(name);
        if (!producer) continue;
        wires.append(make("path", { class: "wire", d: wire(at(producer), end, right) }));
      }
    }
    boxes = new Map();
    for (const node of nodes) {
      const { x, y } = at(node);
      const box = make("g", { class: "op", transform: `translate(${x} ${y})`, role: "button", tabindex: "-1", "aria-pressed": "false" },
        make("rect", { width: cell.w, height: cell.h, rx: dense ? 3 : 6 }));
      if (!dense) {
        const kind = node.kind.length > 12 ? `…${node.kind.slice(-10)}` : node.kind;
        box.append(make("text", { svg: true, x: cell.w / 2, y: cell.h / 2 + 4 }, kind));
      }
      box.node = node;
      boxes.set(node.name, box);
      drawing.append(box);
    }
    place.replaceChildren(drawing);
    paint();
  }

  // Along a row a curve; a jump over operators bends above them; from row to row it leaves at the right and comes in at the left.
  function wire(from, to, right) {
    const x0 = from.x + cell.w, y0 = from.y + cell.h / 2, x1 = to.x, y1 = to.y + cell.h / 2;
    if (from.row !== to.row) return `M${x0} ${y0}H${right}M0 ${y1}H${x1}`;
    const gap = cell.x - cell.w;
    if (to.x - from.x <= cell.x + 1) return y0 === y1 ? `M${x0} ${y0}H${x1}` : `M${x0} ${y0}C${x0 + gap / 2} ${y0} ${x1 - gap / 2} ${y1} ${x1} ${y1}`;
    const over = Math.min(from.y, to.y) - (dense ? 4 : 8);
    const bend = gap * 0.7;
    return `M${x0} ${y0}C${x0 + bend} ${y0} ${x0} ${over} ${x0 + bend * 1.6} ${over}H${x1 - bend * 1.6}C${x1} ${over} ${x1 - bend} ${y1} ${x1} ${y1}`;
  }

  function paint() {
    const measure = measures[picker.value], values = new Map(nodes.map((node) => [node.name, measure.of(node)]));
    const known = Array.from(values.values()).filter((value) => value !== null);
    let least = known.length ? Math.min(...known) : 0, most = known.length ? Math.max(...known) : 1;
    if (measure.floor !== undefined) [least, most] = [measure.floor, Math.max(most, measure.floor)];
    const share = (value) => {
      if (most === least) return 0;
      const linear = Math.max(0, Math.min(1, (value - least) / (most - least)));
      const scaled = measure.root ? Math.sqrt(linear) : linear;
      return measure.low ? 1 - scaled : scaled;
    };
    for (const [name, box] of boxes) {
      const value = values.get(name), told = value === null ? without(name) : measure.tell(value);
      const colour = value === null ? (kept.has(name) ? "kept" : "none") : `q${Math.min(CLASSES - 1, Math.floor(share(value) * CLASSES))}`;
      box.setAttribute("class", `op ${colour}`);
      box.setAttribute("aria-label", `${name}, ${box.node.kind}: ${told}`);
      box.dataset.tip = `${name} (${box.node.kind}): ${told}`;
    }
    const ramp = make("span", { class: "ramp" });
    for (let index = 0; index < CLASSES; index += 1) ramp.append(make("i", { class: `q${index}` }));
    const [first, last] = measure.low ? [most, least] : [least, most];
    legend.replaceChildren(measure.tell(first), ramp, measure.tell(last));
    focusable(chosen || nodes[0].name);
  }

  // One box is in the order of tabs; arrows walk from it.
  function focusable(name) {
    for (const [other, box] of boxes) box.setAttribute("tabindex", other === name ? "0" : "-1");
  }
  function choose(name) {
    chosen = name;
    for (const [other, box] of boxes) box.setAttribute("aria-pressed", other === name);
    focusable(name);
    tell(byName.get(name));
  }
  function tell(node) {
    const panel = document.getElementById("operator");
    const shape = node.shape.length ? `, ${node.shape.join("×")}` : "";
    const macs = node.macs ? `, ${node.macs.toLocaleString("en")} multiply-accumulates` : "";
    const parts = [make("h3", {}, make("code", {}, node.name), ` ${node.kind}${shape}${macs}`)];
    const own = sites.get(node.name) || [];
    if (own.length) {
      const heads = ["Site", "Format", "SQNR", "Clipped", "Output error", "Why"].map((head) => make("th", { scope: "col" }, head));
      const lines = own.map((site) => {
        const scored = (scores.get(node.name) || []).find((one) => one.site === site.site);
        const cells = [
          site.site.slice(site.site.lastIndexOf(":") + 1), site.format, site.sqnr_db === null ? "–" : `${site.sqnr_db.toFixed(1)} dB`,
          percent(site.clipped), scored ? percent(scored.output_error) : "–", site.why,
        ];
        return make("tr", {}, ...cells.map((one) => make("td", {}, one)));
      });
      const table = make("table", {}, make("thead", {}, make("tr", {}, ...heads)), make("tbody", {}, ...lines));
      parts.push(make("div", { class: "scroll" }, table));
      const show = make("button", { type: "button", class: "plain" }, "Show in the plan");
      show.addEventListener("click", () => {
        const search = document.getElementById("filter");
        search.value = `${node.name}:`;
        search.dispatchEvent(new Event("input"));
        document.getElementById("sites").scrollIntoView();
        search.focus({ preventScroll: true });
      });
      parts.push(show);
    } else {
      parts.push(make("p", { class: "note" }, `${without(node.name)[0].toUpperCase()}${without(node.name).slice(1)}.`));
    }
    document.getElementById("operator").replaceChildren(...parts);
    return panel;
  }

  place.addEventListener("click", (event) => {
    const box = event.target.closest(".op");
    if (box) choose(box.node.name);
  });
  place.addEventListener("keydown", (event) => {
    const box = event.target.closest(".op");
    if (!box) return;
    if (event.key === "Enter" || event.key === " ") {
      choose(box.node.name);
      event.preventDefault();
      return;
    }
    const next = neighbour(box.node, event.key);
    if (!next) return;
    event.preventDefault();
    focusable(next.name);
    boxes.get(next.name).focus();
  });
  // Left and right follow the data, up and down the lanes of one level.
  function neighbour(node, key) {
    if (key === "Home") return nodes[0];
    if (key === "End") return nodes[nodes.length - 1];
    if (key === "ArrowLeft") return byName.get(node.inputs[0]) || nodes[nodes.indexOf(node) - 1];
    if (key === "ArrowRight") return nodes.find((other) => other.inputs.includes(node.name)) || nodes[nodes.indexOf(node) + 1];
    const step = { ArrowUp: -1, ArrowDown: 1 }[key];
    return step && nodes.find((other) => other.level === node.level && other.lane === node.lane + step);
  }

  picker.addEventListener("change", paint);
  let width = 0;
  new ResizeObserver(() => {
    if (place.clientWidth === width) return;
    width = place.clientWidth;
    draw();
    if (chosen) choose(chosen);
  }).observe(place);
}
