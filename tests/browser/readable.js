/**
 * Readability of a widget. Texts are measured where the page shows them: a drawing may be scaled, and a part may scroll.
 */
(root, least) => {
  const isShown = (element) => element.checkVisibility({ opacityProperty: true, visibilityProperty: true });
  const view = (element) => {  // the part of the page in which an element is not cut off
    let box = { left: -Infinity, top: -Infinity, right: Infinity, bottom: Infinity };
    for (let at = element.parentElement; at && at !== root.parentElement; at = at.parentElement) {
      if (!/auto|scroll|hidden/.test(getComputedStyle(at).overflow)) continue;
      const own = at.getBoundingClientRect();
      box = { left: Math.max(box.left, own.left), top: Math.max(box.top, own.top), right: Math.min(box.right, own.right), bottom: Math.min(box.bottom, own.bottom) };
    }
    return box;
  };
  const scale = (element) => (element.ownerSVGElement ? element.getScreenCTM().a : 1);
  const texts = [];
  const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode, element = node.parentElement;
    if (!node.data.trim() || !isShown(element) || /^(STYLE|SCRIPT|OPTION)$/.test(element.tagName)) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    const seen = view(element);
    for (const box of range.getClientRects()) {
      if (box.width < 2 || box.height < 2 || box.left > seen.right || box.right < seen.left || box.top > seen.bottom || box.bottom < seen.top) continue;
      const style = getComputedStyle(element);
      const px = parseFloat(style.fontSize) * scale(element);
      const middle = (box.top + box.bottom) / 2;
      const hasHalo = style.paintOrder.startsWith("stroke") && parseFloat(style.strokeWidth) >= 2;
      texts.push({ words: node.data.trim().slice(0, 40), px, node, element, hasHalo, left: Math.max(box.left, seen.left), right: Math.min(box.right, seen.right), top: Math.max(middle - px / 2, seen.top), bottom: Math.min(middle + px / 2, seen.bottom) });
    }
  }
  const fields = [...root.querySelectorAll("input, select")].filter(isShown).map((one) => parseFloat(getComputedStyle(one).fontSize));
  const overlaps = [];
  texts.forEach((one, at) => texts.slice(at + 1).forEach((other) => {
    if (one.node === other.node) return;
    const width = Math.min(one.right, other.right) - Math.max(one.left, other.left);
    const height = Math.min(one.bottom, other.bottom) - Math.max(one.top, other.top);
    const area = (box) => (box.right - box.left) * (box.bottom - box.top);
    if (width > 0 && height > 0 && width * height > 0.12 * Math.min(area(one), area(other))) overlaps.push([one.words, other.words]);
  }));
  const crossed = [];
  for (const line of root.querySelectorAll("svg line, svg polyline, svg path")) {
    const style = getComputedStyle(line);
    if (!isShown(line) || style.stroke === "none" || !(line.getTotalLength() > 0)) continue;
    const matrix = line.getScreenCTM(), length = line.getTotalLength();
    for (const text of texts) {
      if (text.hasHalo || text.element.ownerSVGElement !== line.ownerSVGElement) continue;
      for (let at = 0; at <= length; at += 2) {
        const { x, y } = line.getPointAtLength(at).matrixTransform(matrix);
        const isInside = x > text.left + 2 && x < text.right - 2 && y > text.top + 2 && y < text.bottom - 2;
        if (!isInside || covers(text, x, y)) continue;
        crossed.push(`${text.words}: ${line.getAttribute("class") ?? line.parentElement.getAttribute("class")}`);
        break;
      }
    }
  }
  /** Whether a filled shape lies between the line and the text. */
  function covers(text, x, y) {
    const shapes = [...text.element.ownerSVGElement.querySelectorAll("rect, circle")];
    return shapes.some((one) => {
      const box = one.getBoundingClientRect(), style = getComputedStyle(one);
      return style.fill !== "none" && x >= box.left && x <= box.right && y >= box.top && y <= box.bottom && one.compareDocumentPosition(text.element) & Node.DOCUMENT_POSITION_FOLLOWING;
    });
  }
  const small = texts.filter((one) => one.px < least).map((one) => `${one.words}: ${one.px.toFixed(1)}`);
  const outputs = [root, ...root.querySelectorAll(".jp-OutputArea-output")];
  const wider = Math.max(0, ...outputs.map((one) => one.scrollWidth - one.clientWidth));
  const box = root.getBoundingClientRect();
  return { width: box.width, height: box.height, wider, small, field_px: Math.min(99, ...fields), texts: texts.length, overlaps, crossed: [...new Set(crossed)] };
}
