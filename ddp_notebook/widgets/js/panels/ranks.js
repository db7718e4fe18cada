/** The panel of the ranks: a table of their states, below the list of ranks that wait for each other. */

import { MISSING, bytes, percent } from "../data/format.js";
import { alarmOf, waiting } from "../parts/notices.js";

/** @typedef {{title: string, of: (row: Record<string, any>) => string, number?: boolean, share?: (row: Record<string, any>) => number, wide?: boolean}} Column */

/** @type {Column[]} */
const COLUMNS = [
  { title: "Rank", of: (row) => String(row.rank), number: true },
  { title: "Host", of: (row) => row.host || MISSING },
  { title: "State", of: (row) => row.state || MISSING, wide: true },
  { title: "Line", of: (row) => row.line || MISSING, wide: true },
  { title: "CPU", of: (row) => percent(row.cpu / 100), number: true, share: (row) => row.cpu / 100 },
  { title: "Memory", of: (row) => bytes(row.rss), number: true },
  { title: "GPU", of: (row) => percent(row.gpu / 100), number: true, share: (row) => row.gpu / 100 },
  {
    title: "GPU memory",
    of: (row) => bytes(row.gpu_allocated) + (row.gpu_total > 0 ? ` of ${bytes(row.gpu_total)}` : ""),
    number: true,
    share: (row) => row.gpu_allocated / row.gpu_total,
  },
  { title: "Last collective", of: (row) => row.last || MISSING, wide: true },
  { title: "Waits for", of: (row) => row.waits_for || MISSING, wide: true },
];
const NOT_EVERYWHERE = ["Host", "GPU", "GPU memory"]; // columns that are shown only if a rank has a value

/**
 * @param {HTMLElement} el
 * @param {import("../data/store.js").Store} store
 * @returns {import("./index.js").Panel}
 */
export function ranksPanel(el, store) {
  const document = el.ownerDocument;
  const waits = document.createElement("p");
  waits.className = "ddpm-waits";
  const scroller = document.createElement("div");
  scroller.className = "ddpm-scroller";
  scroller.tabIndex = 0;
  scroller.setAttribute("role", "region");
  scroller.setAttribute("aria-label", "Table of ranks");
  const table = document.createElement("table");
  table.className = "ddpm-ranks";
  scroller.append(table);
  el.append(waits, scroller);
  /** @type {Map<number, HTMLTableRowElement>} */
  const lines = new Map();
  /** @type {Column[]} */
  let columns = [];
  /** @type {Record<string, any>[]} */
  let drawn = [];

  function draw() {
    const rows = store.shownRanks().map((rank) => store.ranks.get(rank)).filter((row) => row !== undefined).map((row) => /** @type {Record<string, any>} */ ({ ...row, host: store.hosts[row.rank] ?? "" }));
    const wanted = COLUMNS.filter(({ title, of }) => !NOT_EVERYWHERE.includes(title) || rows.some((row) => of(row) !== MISSING));
    if (wanted.length !== columns.length || wanted.some((column, at) => column !== columns[at])) head(wanted);
    const body = table.tBodies[0];
    const present = new Set(rows.map((row) => row.rank));
    for (const [rank, line] of lines) {
      if (present.has(rank)) continue;
      line.remove();
      lines.delete(rank);
    }
    const awaited = new Set(rows.map((row) => /^rank (\d+)\b/.exec(row.waits_for)?.[1]));
    let before = "";
    for (const row of rows) {
      let line = lines.get(row.rank);
      if (!line) {
        line = body.insertRow();
        for (const column of columns) line.append(cellOf(column));
        lines.set(row.rank, line);
        const after = [...lines.keys()].filter((rank) => rank > row.rank).sort((a, b) => a - b)[0];
        if (after !== undefined) body.insertBefore(line, lines.get(after) ?? null);
      }
      set(line, row);
      line.classList.toggle("ddpm-begins-host", line.rowIndex > 1 && row.host !== before);
      before = row.host;
      line.classList.toggle("ddpm-is-awaited", awaited.has(String(row.rank)));
    }
    table.classList.toggle("ddpm-roomy", rows.length <= 16);
    const found = waiting(rows);
    const words = rows.length ? found.map(({ words: one }) => one).join("; ") : "Nothing is known of the ranks yet.";
    if (waits.textContent !== words) waits.textContent = words;
    waits.hidden = words === "" || alarmOf(store) !== "";
    drawn = rows;
  }

  /** @param {Column[]} wanted */
  function head(wanted) {
    columns = wanted;
    table.replaceChildren();
    const caption = table.createCaption();
    caption.className = "ddpm-hidden";
    caption.textContent = "How each rank is now";
    const top = table.createTHead().insertRow();
    for (const column of columns) {
      const cell = document.createElement("th");
      cell.scope = "col";
      cell.textContent = column.title;
      if (column.number) cell.className = "ddpm-right";
      top.append(cell);
    }
    table.createTBody();
    lines.clear();
  }

  /** @param {Column} column */
  function cellOf(column) {
    const cell = document.createElement(column.title === "Rank" ? "th" : "td");
    if (column.title === "Rank") cell.setAttribute("scope", "row");
    cell.className = [column.number ? "ddpm-right" : "", column.share ? "ddpm-share" : "", column.wide ? "ddpm-wide" : ""].join(" ").trim();
    return cell;
  }

  /** @param {HTMLTableRowElement} line @param {Record<string, any>} row */
  function set(line, row) {
    columns.forEach((column, at) => {
      const cell = line.cells[at];
      const words = column.of(row);
      if (cell.textContent !== words) {
        cell.textContent = words;
        if (column.wide) cell.title = words;
      }
      if (column.share) {
        const share = Math.min(1, Math.max(0, column.share(row) || 0));
        cell.style.setProperty("--share", `${(100 * share).toFixed(0)}%`);
      }
    });
    const waitsNow = Boolean(row.waits_for);
    line.classList.toggle("ddpm-is-waiting", waitsNow);
    line.classList.toggle("ddpm-is-gone", /dead|died|gone|ended|failed|killed|left/.test(row.state));
  }

  return {
    controls: [],
    draw,
    resize() {},
    height: () => Math.min(470, 66 + 27 * Math.max(2, store.shownRanks().length)),
    describe: () => `${store.ranks.size} ranks; ${waits.textContent || "none waits"}.`,
    table: () => null, // the panel is a table itself
    notes: () => [],
    state: () => ({ rows: drawn, waiting: waiting(drawn), alarm: alarmOf(store) }),
    onKey: () => false,
    destroy: () => el.replaceChildren(),
  };
}

