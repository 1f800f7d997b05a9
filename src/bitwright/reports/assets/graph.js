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
    return name in record.folds ? `folded into ${record.folds[name]}` : "no separate quantizer";
  };
  const bits = (site) => Number((site.format.match(/\d+/) || [32])[0]);
  const worst = (rows, value, choose) => {
    const known = (rows || []).map(value).filter((one) => one !== null && one !== undefined);
    return known.length ? choose(...known) : null;
  };
  const decimals = (value) => `${value.toPrecision(3)}`;
  // How each measure is read, which end is bad, and how it is told. Those with `steps` change colour there, whatever the
  // model: 40 dB is harmless everywhere. The others have no such scale, and go from the least to the most.
  const measures = {
    loss_change: { of: (node) => worst(scores.get(node.name), (one) => one.loss_change, Math.max), steps: [0.001, 0.003, 0.01, 0.03, 0.1, 0.3], tell: decimals, unit: "" },
    output_error: { of: (node) => worst(scores.get(node.name), (one) => one.output_error, Math.max), steps: [0.001, 0.003, 0.01, 0.03, 0.1, 0.3], tell: (v) => percent(v) },
    sqnr_db: { of: (node) => worst(sites.get(node.name), (one) => one.sqnr_db, Math.min), low: true, steps: [40, 35, 30, 25, 20, 15], tell: (v) => `${v.toFixed(1)} dB`, unit: "dB" },
    clipped: { of: (node) => worst(sites.get(node.name), (one) => one.clipped, Math.max), steps: [0.0001, 0.001, 0.005, 0.01, 0.05, 0.1], tell: (v) => percent(v) },
    bits: { of: (node) => worst(sites.get(node.name), bits, Math.min), low: true, steps: [16, 8, 6, 5, 4, 3], tell: (v) => `${v} bits`, unit: "bits" },
    macs: { of: (node) => node.macs || null, floor: 0, root: true, tell: (v) => v.toLocaleString("en") },
  };
  const CLASSES = 7;
  const picker = document.getElementById("measure"), legend = document.getElementById("legend");
  const dense = nodes.length > 160;
  const cell = dense ? { w: 15, h: 15, x: 24, y: 23 } : { w: 98, h: 34, x: 112, y: 48 };
  const gutter = dense ? 92 : 0;  // where a row of hundreds says in which block it begins
  const tail = (text, most) => (text.length > most ? `…${text.slice(1 - most)}` : text);
  // The module's path, without the number of a call that nobody counts.
  const path = (node) => node.name.replace(/^\//, "").replace(/#0$/, "");
  const block = (node) => tail(path(node).split(/[./]/).slice(0, -1).join(".") || path(node), 13);
  let chosen = null, boxes = new Map();

  function draw() {
    const room = Math.max(place.clientWidth - 16 - gutter, 3 * cell.x), columns = Math.max(3, Math.floor(room / cell.x));
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
      return { row, x: gutter + (node.level % columns) * cell.x + 4, y: tops[row] + node.lane * cell.y };
    };
    const drawing = make("svg", { width: gutter + columns * cell.x, height, role: "group", "aria-label": "The model's operators" });
    const wires = make("g", { "aria-hidden": "true" });
    drawing.append(wires);
    const right = gutter + columns * cell.x - 1;
    if (dense) {
      let last = "";
      lanes.forEach((_, row) => {
        const first = nodes.find((node) => Math.floor(node.level / columns) === row && node.lane === 0) || nodes.find((node) => Math.floor(node.level / columns) === row);
        const name = first ? block(first) : "";
        if (name && name !== last) drawing.append(make("text", { svg: true, class: "soft", x: 0, y: tops[row] + 12 }, name));
        last = name;
      });
    }
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
        const alone = path(node).replace(/#\d+$/, "") === node.kind;  // a function of the model itself: its name says all
        box.append(make("text", { svg: true, class: "path", x: cell.w / 2, y: alone ? 21 : 14 }, tail(path(node), 13)));
        if (!alone) box.append(make("text", { svg: true, class: "kind", x: cell.w / 2, y: 27 }, tail(node.kind, 14)));
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
    if (from.row !== to.row) return `M${x0} ${y0}H${right}M${gutter} ${y1}H${x1}`;
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
    const colour = (value) => {
      if (measure.steps) return measure.steps.filter((step) => (measure.low ? value < step : value >= step)).length;
      return Math.min(CLASSES - 1, Math.floor(share(value) * CLASSES));
    };
    const share = (value) => {
      if (most === least) return 0;
      const linear = Math.max(0, Math.min(1, (value - least) / (most - least)));
      const scaled = measure.root ? Math.sqrt(linear) : linear;
      return scaled;
    };
    for (const [name, box] of boxes) {
      const value = values.get(name), told = value === null ? without(name) : measure.tell(value);
      box.setAttribute("class", `op ${value === null ? (kept.has(name) ? "kept" : "none") : `q${colour(value)}`}`);
      box.setAttribute("aria-label", `${name}, ${box.node.kind}: ${told}`);
      box.dataset.tip = `${name} (${box.node.kind}): ${told}`;
    }
    if (measure.steps) {
      const bound = (step) => (measure.unit === undefined ? percent(step) : String(step));
      const words = measure.steps.map((step) => `${measure.low ? "under" : "from"} ${bound(step)}`);
      const first = `${measure.low ? "from" : "under"} ${bound(measure.steps[0])}${measure.unit ? ` ${measure.unit}` : ""}`;
      legend.replaceChildren(...[first, ...words].map((word, index) => make("span", {}, make("i", { class: `q${index}` }), word)));
      focusable(chosen || nodes[0].name);
      return;
    }
    const ramp = make("span", { class: "ramp" });
    for (let index = 0; index < CLASSES; index += 1) ramp.append(make("i", { class: `q${index}` }));
    legend.replaceChildren(measure.tell(least), ramp, measure.tell(most));
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
  // At once, not at the first frame: a page in the background, or a printer, may never have one.
  let width = place.clientWidth;
  draw();
  new ResizeObserver(() => {
    if (place.clientWidth === width) return;
    width = place.clientWidth;
    draw();
    if (chosen) choose(chosen);
  }).observe(place);
}
