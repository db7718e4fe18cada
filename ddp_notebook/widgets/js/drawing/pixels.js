/**
 * Draws rectangles directly into pixels. A canvas takes a third of a microsecond for each, which is too slow for tens
 * of thousands.
 */

/**
 * @param {Uint32Array} pixels row by row
 * @param {number} width of a row
 * @param {number} top first row that may be painted
 * @param {number} left first column
 * @param {Float32Array} quads x, y, width, height
 * @param {number} count of quads
 * @param {number} colour as returned by `abgr`
 * @param {number} scale pixels per unit of the quads
 */
export function paint(pixels, width, top, left, quads, count, colour, scale) {
  const height = pixels.length / width;
  for (let i = 0; i < 4 * count; i += 4) {
    const x0 = Math.round(quads[i] * scale), y0 = Math.round(quads[i + 1] * scale);
    // At least one pixel, so that every rectangle is visible.
    const x1 = Math.min(width, Math.max(x0 + 1, Math.round((quads[i] + quads[i + 2]) * scale)));
    const y1 = Math.min(height, Math.max(y0 + 1, Math.round((quads[i + 1] + quads[i + 3]) * scale)));
    const x = x0 < left ? left : x0;
    for (let y = y0 < top ? top : y0; y < y1; y++) {
      const row = y * width;
      if (x1 - x > 32) pixels.fill(colour, row + x, row + x1);
      else for (let at = row + x; at < row + x1; at++) pixels[at] = colour;
    }
  }
}

/** A colour in the pixel format of ImageData (little endian). @param {number[]} rgb @param {number} [alpha] 0 to 255 */
export function abgr([red, green, blue], alpha = 255) {
  return ((alpha << 24) | (Math.round(blue) << 16) | (Math.round(green) << 8) | Math.round(red)) >>> 0;
}
