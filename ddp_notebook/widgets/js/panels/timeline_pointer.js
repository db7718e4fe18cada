/**
 * Dragging, pinching, the wheel and clicks on the timeline.
 */

/**
 * @param {HTMLCanvasElement} canvas
 * @param {{zoomBy: (factor: number, x: number) => void, panBy: (pixels: number) => void, scrollBy: (pixels: number) => void,
 *   moved: (at: Point) => void, left: () => void, click: (at: Point) => void, hasFocus: () => boolean}} actions moved:
 *   the pointer moved, pressed or not; left: it has left the picture; hasFocus: whether the timeline has the focus
 *
 * @typedef {{x: number, y: number}} Point CSS pixels in the canvas
 *
 */
export function pointer(canvas, { zoomBy, panBy, scrollBy, moved, left, click, hasFocus }) {
  /** @type {Map<number, Point>} */
  const touches = new Map();
  let dragged = 0;

  /** @param {MouseEvent} event @returns {Point} */
  function place(event) {
    const box = canvas.getBoundingClientRect();
    return { x: event.clientX - box.left, y: event.clientY - box.top };
  }

  /** @param {PointerEvent} event */
  function release(event) {
    touches.delete(event.pointerId);
    canvas.style.cursor = "crosshair";
  }

  canvas.addEventListener("pointermove", (event) => {
    const at = place(event);
    const before = touches.get(event.pointerId);
    const other = [...touches].find(([id]) => id !== event.pointerId)?.[1];
    if (before && other && touches.size === 2) {
      const apart = Math.abs(before.x - other.x), wanted = Math.abs(at.x - other.x);
      if (apart > 8 && wanted > 8) zoomBy(wanted / apart, other.x);
    } else if (before) {
      dragged += Math.abs(at.x - before.x) + Math.abs(at.y - before.y);
      if (dragged > 4) {
        canvas.style.cursor = "grabbing";
        if (at.x !== before.x) panBy(before.x - at.x);
        scrollBy(before.y - at.y);
      }
    }
    if (before) touches.set(event.pointerId, at);
    moved(at);
  });
  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    touches.set(event.pointerId, place(event));
    dragged = 0;
  });
  canvas.addEventListener("pointerup", (event) => {
    release(event);
    if (dragged <= 4) click(place(event));
  });
  canvas.addEventListener("pointercancel", release);
  canvas.addEventListener("pointerleave", left);
  canvas.addEventListener("wheel", (event) => {
    // The wheel scrolls the page, unless the timeline has the focus or Ctrl is pressed (as a pinch gesture does).
    const isOurs = event.ctrlKey || event.metaKey || hasFocus();
    const isSideways = Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey;
    if (!isOurs && !isSideways) return;
    event.preventDefault();
    const unit = event.deltaMode === 1 ? 16 : event.deltaMode === 2 ? 400 : 1;
    if (isSideways) panBy((event.deltaX || event.deltaY) * unit);
    else zoomBy(Math.exp((-event.deltaY * unit) / (event.ctrlKey ? 100 : 400)), place(event).x);
  }, { passive: false });
  canvas.addEventListener("dblclick", (event) => zoomBy(event.shiftKey ? 1 / 3 : 3, place(event).x));
}
