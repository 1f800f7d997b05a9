"use strict";
// Theme, tables, tips: what every page has. Tables are whole without this script; it only filters and sorts.
const record = JSON.parse(document.getElementById("record").textContent);
const SVG = document.querySelector(".logo").namespaceURI;  // written out, it would look like an address

// Makes an element; text is text, never markup.
function make(name, attributes = {}, ...children) {
  const svg = ["svg", "g", "rect", "path", "line", "circle", "title"].includes(name) || attributes.svg;
  const element = svg ? document.createElementNS(SVG, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key !== "svg" && value !== undefined && value !== null) element.setAttribute(key, value);
  }
  element.append(...children);
  return element;
}

// Colours: as the system, light, dark. A page on a disk may have no storage: then the choice lasts as long as the page.
const themes = { auto: "Auto", light: "Light", dark: "Dark" };
const themeButton = document.getElementById("theme");
function stored(value) {
  try {
    if (value !== undefined) localStorage.setItem("bitwright-theme", value);
    return localStorage.getItem("bitwright-theme");
  } catch {
    return null;
  }
}
let theme = stored() in themes ? stored() : "auto";
function showTheme() {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  themeButton.querySelector("span").textContent = themes[theme];
  themeButton.setAttribute("aria-label", `Colours: ${theme === "auto" ? "as the system" : theme}`);
}
themeButton.hidden = false;
themeButton.addEventListener("click", () => {
  const names = Object.keys(themes);
  theme = names[(names.indexOf(theme) + 1) % names.length];
  stored(theme);
  showTheme();
});
showTheme();

// Tables: a click on a head sorts; numbers by their value, text as people count.
function sortBy(table, column, down) {
  const body = table.tBodies[0], heads = Array.from(table.tHead.rows[0].cells);
  heads.forEach((head) => head.removeAttribute("aria-sort"));
  heads[column].setAttribute("aria-sort", down ? "descending" : "ascending");
  const keyed = Array.from(body.rows).filter((row) => !row.classList.contains("detail")).map((row) => {
    const cell = row.cells[column];
    return [cell.dataset.v === undefined ? cell.textContent : Number(cell.dataset.v), row];
  });
  const collator = new Intl.Collator(undefined, { numeric: true });
  keyed.sort(([x], [y]) => {
    const order = typeof x === "number" ? x - y : collator.compare(x, y);
    return down ? -order : order;
  });
  body.append(...keyed.flatMap(([, row]) => (row.detail ? [row, row.detail] : [row])));
  table.dispatchEvent(new Event("sorted"));
}
// Narrow screens show rows as cards without table heads, so each number gets the name of its column.
const narrow = matchMedia("(max-width: 46rem)");
function nameCells(table) {
  const heads = Array.from(table.tHead.rows[0].cells).map((head) => head.textContent);
  let done = false;
  const name = () => {
    if (!narrow.matches || done) return;
    done = true;
    for (const row of table.tBodies[0].rows) for (const cell of row.cells) cell.dataset.h = heads[cell.cellIndex];
  };
  narrow.addEventListener("change", name);
  name();
}
document.querySelectorAll("table.stacked").forEach(nameCells);
for (const table of document.querySelectorAll("table.sortable")) {
  Array.from(table.tHead.rows[0].cells).forEach((head, column) => {
    head.querySelector("button").addEventListener("click", () => {
      sortBy(table, column, head.getAttribute("aria-sort") === "ascending");
    });
  });
}

// Tips: of points and bars, by the pointer and by the keyboard.
const tip = make("div", { id: "tip", hidden: "" });
document.body.append(tip);
function showTip(event) {
  const from = event.target.closest && event.target.closest("[data-tip]");
  tip.hidden = !from;
  if (!from) return;
  tip.textContent = from.dataset.tip;
  const box = from.getBoundingClientRect();
  const x = event.type === "focusin" ? box.x + box.width / 2 : event.clientX;
  tip.style.left = `${Math.max(8, Math.min(x + 12, innerWidth - tip.offsetWidth - 8))}px`;
  const above = box.y - tip.offsetHeight - 8;
  tip.style.top = `${above > 8 ? above : box.bottom + 8}px`;
}
for (const kind of ["pointermove", "focusin"]) document.addEventListener(kind, showTip);
for (const kind of ["focusout", "scroll"]) document.addEventListener(kind, () => { tip.hidden = true; }, { passive: true });
document.addEventListener("keydown", (event) => { if (event.key === "Escape") tip.hidden = true; });

// Names of points: each goes where it meets no point, no other name and no edge; one that had to go far has a line.
function placeNames(drawing) {
  const width = drawing.clientWidth, names = Array.from(drawing.querySelectorAll("text.name"));
  if (!width || !names.length) return;
  drawing.querySelectorAll(".leader").forEach((line) => line.remove());
  const meets = (a, b) => a.x < b.x + b.w && b.x < a.x + a.w && a.y < b.y + b.h && b.y < a.y + a.h;
  const dots = Array.from(drawing.querySelectorAll(".dot")).map((dot) => {
    const x = dot.cx.baseVal.value, y = dot.cy.baseVal.value;
    return { x: x - 8, y: y - 8, w: 16, h: 16 };
  });
  const taken = Array.from(drawing.querySelectorAll("text:not(.name)")).map((text) => {
    const box = text.getBBox();
    return { x: box.x, y: box.y, w: box.width, h: box.height };
  });
  const floor = Number(drawing.getAttribute("height")) - 36, line = 15;
  const put = (name, box, x, y) => {
    name.removeAttribute("dx");
    name.setAttribute("text-anchor", "start");
    name.setAttribute("x", `${(100 * box.x / width).toFixed(3)}%`);  // in percent: a print is of another width
    name.setAttribute("y", (box.y + 11.5).toFixed(1));
    taken.push(box);
    const near = { x: Math.max(box.x, Math.min(x, box.x + box.w)), y: Math.max(box.y, Math.min(y, box.y + box.h)) };
    const far = Math.hypot(near.x - x, near.y - y);
    if (far < 14) return;
    const at = 7 / far, leader = { x1: x + (near.x - x) * at, x2: near.x, y1: y + (near.y - y) * at, y2: near.y };
    drawing.insertBefore(make("line", {
      class: "leader", x1: `${(100 * leader.x1 / width).toFixed(3)}%`, x2: `${(100 * leader.x2 / width).toFixed(3)}%`, y1: leader.y1, y2: leader.y2,
    }), drawing.querySelector(".dot"));
  };
  for (const name of names) {
    const x = parseFloat(name.dataset.x) * width / 100, y = Number(name.dataset.y), w = Math.ceil(name.getBBox().width) + 2, h = line - 1;
    const sides = [];
    for (let step = 1; step < 18; step += 1) {
      for (const dy of [-line * step, line * step]) for (const left of [x - w / 2, x + 8, x - 8 - w, 0.12 * width, width - w]) sides.push([left, dy]);
    }
    const away = ([left, dy]) => Math.hypot(Math.max(left - x, x - left - w, 0), dy);
    sides.sort((a, b) => away(a) - away(b)).unshift([x + 10, 0], [x - 10 - w, 0]);
    const boxes = sides.map(([left, dy]) => ({ x: left, y: y - h / 2 + dy, w, h }));
    const free = boxes.find((box) => box.x >= 0 && box.x + w <= width && box.y >= 14 && box.y + h <= floor
      && !dots.some((dot) => meets(dot, box)) && !taken.some((other) => meets(other, box)));
    name.style.display = free ? "" : "none";  // its point still tells its name
    if (free) put(name, free, x, y);
  }
}
// Names in bars: those that fit.
function fitNames(drawing) {
  for (const name of drawing.querySelectorAll("text.in")) {
    const bar = name.previousElementSibling.getBBox();
    name.style.visibility = name.getBBox().width + 10 > bar.width ? "hidden" : "";
  }
}
const fitted = new ResizeObserver((entries) => entries.forEach((entry) => fitNames(entry.target)));
document.querySelectorAll("svg.lanes").forEach((drawing) => fitted.observe(drawing));
const named = new ResizeObserver((entries) => entries.forEach((entry) => placeNames(entry.target)));
document.querySelectorAll("svg.scatter").forEach((drawing) => named.observe(drawing));

// The first frame is painted: long tables may be laid out now, if they are near.
requestAnimationFrame(() => requestAnimationFrame(() => document.documentElement.classList.add("opened")));
