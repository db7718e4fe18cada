// The order of search results: pages of the guide first, then the reference, then notebooks, and the design of the code
// last. Sphinx adds the other scores; their values are its own.
const FOLDERS = [
  ["guide/", 30],
  ["reference/", 10],
  ["notebooks/", 0],
  ["design/", -30],
  ["ARCHITECTURE", -30],
  ["CONTRIBUTING", -30],
  ["CHANGELOG", -30],
  ["measurements/", -40],
  ["tests/", -40],
];

globalThis.Scorer = {
  score: ([docname, , , , score]) => score + (FOLDERS.find(([folder]) => docname.startsWith(folder))?.[1] ?? 0),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
