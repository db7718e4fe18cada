/** A canvas that is sharp on any screen, with text and arrows. */

export const FONT = 'system-ui, -apple-system, "Segoe UI", "Helvetica Neue", Arial, "Liberation Sans", sans-serif';

const HEAD_PX = 7, HEAD_ANGLE = 0.4;

/** @param {number} size CSS pixels @param {string} [weight] */
export function font(size, weight = "") {
  return `${weight} ${size}px ${FONT}`.trim();
}

/**
 * A line with an arrowhead at its end.
 * @param {CanvasRenderingContext2D} pen
 * @param {number} x0
 * @param {number} y0
 * @param {number} x1
 * @param {number} y1
 */
export function arrow(pen, x0, y0, x1, y1) {
  pen.beginPath();
  pen.moveTo(x0, y0);
  pen.lineTo(x1, y1);
  pen.stroke();
  const angle = Math.atan2(y1 - y0, x1 - x0);
  pen.beginPath();
  pen.moveTo(x1, y1);
  for (const side of [angle - HEAD_ANGLE, angle + HEAD_ANGLE]) pen.lineTo(x1 - HEAD_PX * Math.cos(side), y1 - HEAD_PX * Math.sin(side));
  pen.fill();
}

export class Surface {
  /** @param {HTMLElement} el @param {string} [className] */
  constructor(el, className = "ddpm-canvas") {
    this.canvas = el.ownerDocument.createElement("canvas");
    this.canvas.className = className;
    el.append(this.canvas);
    this.pen = /** @type {CanvasRenderingContext2D} */ (this.canvas.getContext("2d"));
    this.width = this.height = 0;
    this.dpr = 1;
  }

  /** Set the size. Drawing uses CSS pixels. @param {number} width @param {number} height @param {number} dpr */
  resize(width, height, dpr) {
    this.width = Math.max(1, Math.floor(width));
    this.height = Math.max(1, Math.floor(height));
    this.dpr = dpr;
    this.canvas.width = Math.round(this.width * dpr);
    this.canvas.height = Math.round(this.height * dpr);
    this.canvas.style.width = `${this.width}px`;
    this.canvas.style.height = `${this.height}px`;
  }

  clear() {
    this.pen.setTransform(this.dpr, 0, 0, this.dpr, 0, 0);
    this.pen.clearRect(0, 0, this.width, this.height);
  }

  /**
   * @param {string} words
   * @param {number} x
   * @param {number} y
   * @param {{colour: string, size?: number, weight?: string, align?: CanvasTextAlign, base?: CanvasTextBaseline, width?: number}} style
   */
  write(words, x, y, { colour, size = 12, weight = "", align = "left", base = "middle", width }) {
    const { pen } = this;
    pen.font = font(size, weight);
    pen.fillStyle = colour;
    pen.textAlign = align;
    pen.textBaseline = base;
    const measure = /** @param {string} text */ (text) => pen.measureText(text).width;
    pen.fillText(width === undefined ? words : shortened(words, width, measure, align === "right"), x, y);
  }

  /** A line on whole device pixels. @param {number} x0 @param {number} y0 @param {number} x1 @param {number} y1 @param {string} colour */
  rule(x0, y0, x1, y1, colour) {
    const { pen, dpr } = this;
    const snap = /** @param {number} value */ (value) => (Math.round(value * dpr) + 0.5) / dpr;
    pen.strokeStyle = colour;
    pen.lineWidth = 1 / dpr;
    pen.setLineDash([]);
    pen.beginPath();
    pen.moveTo(x0 === x1 ? snap(x0) : x0, y0 === y1 ? snap(y0) : y0);
    pen.lineTo(x0 === x1 ? snap(x1) : x1, y0 === y1 ? snap(y1) : y1);
    pen.stroke();
  }

  destroy() {
    this.canvas.remove();
  }
}

/**
 * Shorten a text to fit. A parameter name is cut at the front, because its end is more informative; a sentence is cut
 * at its end.
 *
 * @param {string} words
 * @param {number} width
 * @param {(words: string) => number} measure
 * @param {boolean} isName
 */
export function shortened(words, width, measure, isName) {
  if (measure(words) <= width) return words;
  const cut = /** @param {number} count */ (count) => (isName ? `…${words.slice(words.length - count)}` : `${words.slice(0, count).trimEnd()}…`);
  let low = 0;
  let high = words.length;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (measure(cut(middle)) <= width) low = middle;
    else high = middle - 1;
  }
  return low ? cut(low) : "";
}
