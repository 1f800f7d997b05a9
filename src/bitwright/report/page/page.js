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
}
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

// The first frame is painted: long tables may be laid out now, if they are near.
requestAnimationFrame(() => requestAnimationFrame(() => document.documentElement.classList.add("opened")));
