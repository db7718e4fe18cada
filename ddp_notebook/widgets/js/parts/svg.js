/** Create SVG elements in one line. */

const SVG = "http://www.w3.org/2000/svg";

/**
 * @template {keyof SVGElementTagNameMap} T
 * @param {Document} document @param {T} tag @param {Record<string, string|number>} [attributes] @param {...(Node|string)} children
 * @returns {SVGElementTagNameMap[T]}
 */
export function svg(document, tag, attributes = {}, ...children) {
  const found = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) found.setAttribute(name, String(value));
  found.append(...children);
  return found;
}

/** A line that ends in an arrow. @param {Document} document @param {number[]} from @param {number[]} to @param {Record<string, string|number>} more */
export function arrow(document, from, to, more = {}) {
  const [dx, dy] = [to[0] - from[0], to[1] - from[1]];
  const length = Math.hypot(dx, dy) || 1;
  const [ux, uy] = [dx / length, dy / length];
  const head = [to[0] - ux * 8, to[1] - uy * 8];
  const points = [to, [head[0] - uy * 4.5, head[1] + ux * 4.5], [head[0] + uy * 4.5, head[1] - ux * 4.5]];
  return svg(
    document,
    "g",
    more,
    svg(document, "line", { x1: from[0], y1: from[1], x2: head[0], y2: head[1] }),
    svg(document, "polygon", { points: points.map((point) => point.map((x) => x.toFixed(1)).join(",")).join(" ") }),
  );
}
