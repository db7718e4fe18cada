/**
 * Colours with a fixed meaning, for light and for dark pages, after Okabe and Ito: they are distinguishable with any
 * colour vision. No information depends on colour alone: there is always also a label, a number or a hatch.
 *
 * | what | colour |
 * |---|---|
 * | forward, compute | blue |
 * | backward | orange |
 * | gradient of the weights alone | pink |
 * | optimizer | green |
 * | input | purple |
 * | named block | grey blue |
 * | execution of a remote call | light blue; the call itself is communication |
 * | communication, exposed communication | vermillion; light blue if hidden by compute; hatched with the colour of compute if overlapped |
 * | waiting | background of the page, with an outline |
 * | failed | text colour, crossed out |
 */

/**
 * @typedef {object} Palette
 * @property {"light"|"dark"} theme
 * @property {string} paper   background
 * @property {string} ink     text
 * @property {string} soft    secondary text, axes
 * @property {string} line    rules, outlines of waiting
 * @property {string} grid
 * @property {string} hover   background of elements that are chosen or under the pointer
 * @property {string} focus
 * @property {string} alarm
 * @property {Record<string, string>} fill  by meaning: forward backward optimizer input compute communication hidden exposed
 *   overlapped overlappedStripe waiting waitingLine failed failedLine cell rest
 * @property {string[]} ranks eight hues
 * @property {{low: string, zero: string, high: string}} diverging  heat maps, centred on zero
 */

/** @type {Palette} */
const LIGHT = {
  theme: "light",
  paper: "#ffffff",
  ink: "#1c1c1c",
  soft: "#5a5a5a",
  line: "#8a8a8a",
  grid: "#0000001a",
  hover: "#0000000d",
  focus: "#0b62c4",
  alarm: "#b3261e",
  fill: {
    forward: "#0072b2",
    compute: "#0072b2",
    backward: "#e69f00",
    "input gradient": "#e69f00",
    "weight gradient": "#cc79a7",
    block: "#4f5f6a",
    execution: "#56b4e9",
    optimizer: "#009e73",
    input: "#a862a0",
    communication: "#d55e00",
    hidden: "#56b4e9",
    exposed: "#d55e00",
    overlapped: "#0072b2",
    overlappedStripe: "#ffb27d",
    waiting: "#ffffff",
    waitingLine: "#8a8a8a",
    failed: "#1c1c1c",
    failedLine: "#ffffff",
    cell: "#c9c9c9",
    rest: "#c4c4c4",
  },
  ranks: ["#0072b2", "#d55e00", "#00855f", "#b5508a", "#9a6b00", "#3d9bd6", "#7458b0", "#6a6a6a"],
  diverging: { low: "#2166ac", zero: "#f7f7f7", high: "#b2182b" },
};

/** @type {Palette} */
const DARK = {
  theme: "dark",
  paper: "#111111",
  ink: "#ececec",
  soft: "#adadad",
  line: "#8a8a8a",
  grid: "#ffffff21",
  hover: "#ffffff14",
  focus: "#7ab8ff",
  alarm: "#ff8a80",
  fill: {
    forward: "#3a9bdc",
    compute: "#3a9bdc",
    backward: "#f0b429",
    "input gradient": "#f0b429",
    "weight gradient": "#f7a8d0",
    block: "#70808a",
    execution: "#a9d8f5",
    optimizer: "#2bb98c",
    input: "#c58ac0",
    communication: "#ff8138",
    hidden: "#a9d8f5",
    exposed: "#ff8138",
    overlapped: "#3a9bdc",
    overlappedStripe: "#ffb27d",
    waiting: "#111111",
    waitingLine: "#9a9a9a",
    failed: "#ececec",
    failedLine: "#111111",
    cell: "#4a4a4a",
    rest: "#5a5a5a",
  },
  ranks: ["#56b4e9", "#ff8138", "#2bc79a", "#e08cc0", "#e0b03c", "#8fa8ff", "#b79cf0", "#b5b5b5"],
  diverging: { low: "#6baed6", zero: "#1d1d1d", high: "#fb6a4a" },
};

/**
 * @param {"light"|"dark"} theme
 * @param {string} [paper] background of the page, if it differs
 * @returns {Palette}
 */
export function palette(theme, paper) {
  const base = theme === "dark" ? DARK : LIGHT;
  if (!paper) return base;
  const fill = { ...base.fill, waiting: paper, failedLine: paper };
  return { ...base, paper, fill };
}

/**
 * Hue and dash pattern of a rank's line. After eight hues the lines are dashed, then dotted.
 * @param {Palette} colours
 * @param {number} rank
 * @returns {{colour: string, dash: number[]}}
 */
export function rankStyle(colours, rank) {
  const count = colours.ranks.length;
  const dashes = [[], [6, 3], [2, 2], [8, 3, 2, 3]];
  return { colour: colours.ranks[rank % count], dash: dashes[Math.floor(rank / count) % dashes.length] };
}

/**
 * Relative luminance of `#rgb…` or `rgb(…)`, 0 to 1; NaN if it is neither.
 * Source: https://www.w3.org/TR/WCAG21/#dfn-relative-luminance
 * @param {string} colour
 */
function luminance(colour) {
  const parts = channels(colour);
  if (!parts) return NaN;
  const [red, green, blue] = parts.map((part) => {
    const value = part / 255;
    return value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
}

/** Contrast of two colours, 1 to 21. @param {string} one @param {string} other */
export function contrast(one, other) {
  const [low, high] = [luminance(one), luminance(other)].sort((a, b) => a - b);
  return (high + 0.05) / (low + 0.05);
}

/** Dark or white, whichever has more contrast on this background. @param {string} background */
export function textOn(background) {
  return contrast(background, "#1c1c1c") >= contrast(background, "#ffffff") ? "#1c1c1c" : "#ffffff";
}

/** @param {string} colour @returns {number[]|null} */
export function channels(colour) {
  const hex = /^#([0-9a-f]{2})([0-9a-f]{2})([0-9a-f]{2})/i.exec(colour);
  if (hex) return hex.slice(1).map((part) => parseInt(part, 16));
  const rgb = /^rgba?\(\s*([\d.]+)[\s,]+([\d.]+)[\s,]+([\d.]+)/.exec(colour);
  return rgb ? rgb.slice(1).map(Number) : null;
}

/**
 * The theme of the page. JupyterLab sets it on the body; elsewhere it is derived from the background of an element.
 * @param {Element} el
 * @returns {"light"|"dark"}
 */
export function themeOf(el) {
  const said = el.ownerDocument.body?.dataset.jpThemeLight;
  if (said !== undefined) return said === "false" ? "dark" : "light";
  const behind = luminance(getComputedStyle(el).backgroundColor);
  if (!Number.isNaN(behind)) return behind < 0.25 ? "dark" : "light";
  return matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
}

/**
 * A diagonal hatch, which marks compute during communication.
 * @param {CanvasRenderingContext2D} context
 * @param {string} ground
 * @param {string} stripe
 * @param {number} dpr
 */
export function hatch(context, ground, stripe, dpr) {
  const size = Math.max(6, Math.round(6 * dpr));
  const tile = context.canvas.ownerDocument.createElement("canvas");
  tile.width = tile.height = size;
  const pen = /** @type {CanvasRenderingContext2D} */ (tile.getContext("2d"));
  pen.fillStyle = ground;
  pen.fillRect(0, 0, size, size);
  pen.strokeStyle = stripe;
  pen.lineWidth = size / 3.5;
  pen.beginPath();
  for (const shift of [-size, 0, size]) {
    pen.moveTo(shift - 1, size + 1);
    pen.lineTo(shift + size + 1, -1);
  }
  pen.stroke();
  return /** @type {CanvasPattern} */ (context.createPattern(tile, "repeat"));
}
