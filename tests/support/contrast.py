"""A script for the browser: texts whose contrast to their ground is less than 4.5, as WCAG AA asks."""

from __future__ import annotations

CONTRAST = """() => {
  const parse = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
  const light = ([r, g, b]) => {
    const part = (v) => { v /= 255; return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; };
    return 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
  };
  const ground = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const colour = parse(getComputedStyle(at).backgroundColor);
      if (colour.length === 3 || colour[3] > 0) return colour;
    }
    return [255, 255, 255];
  };
  const bad = [];
  for (const element of document.querySelectorAll("body *")) {
    if (element.closest("svg, script, noscript") || !element.offsetParent) continue;
    const text = Array.from(element.childNodes).some((node) => node.nodeType === 3 && node.textContent.trim());
    if (!text) continue;
    const [a, b] = [light(parse(getComputedStyle(element).color)), light(ground(element))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    const words = element.textContent.slice(0, 30);
    if (ratio < 4.5) bad.push(`${element.tagName}.${element.className}: ${ratio.toFixed(2)} ${words}`);
  }
  return bad;
}"""
