/** Rules for modules: permitted imports, the largest size, and a complete list in index.js. */

import assert from "node:assert/strict";
import { readFileSync, readdirSync } from "node:fs";
import { dirname, join, normalize, relative } from "node:path";
import { test } from "node:test";
import { fileURLToPath } from "node:url";

const PACKAGE = fileURLToPath(new URL("../../ddp_notebook/", import.meta.url));
const ROOMS = ["widgets/js/data", "widgets/js/drawing", "widgets/js/parts", "widgets/js/panels", "widgets/js", "lessons/js"];
const MOST_LINES = 400, MOST_MODULES = 14;
const MODULES = ROOMS.flatMap((room) => readdirSync(join(PACKAGE, room)).filter((name) => name.endsWith(".js")).map((name) => `${room}/${name}`));
const text = (module) => readFileSync(join(PACKAGE, module), "utf8");

/** Return the modules that a source imports, without the types in comments. */
function importsOf(source, module) {
  const code = source.replace(/\/\*[\s\S]*?\*\//g, "");
  const found = [...code.matchAll(/^(?:import|export)\b[^;"]*"(\.[^"]+)"|\bimport\(\s*"(\.[^"]+)"/gm)].map(([, named, dynamic]) => named ?? dynamic);
  return found.map((path) => normalize(join(dirname(module), path)));
}

/** Return a cycle in a graph as the list of its modules, or null if there is none. */
function circleIn(graph) {
  const done = new Set();
  const path = [];
  const visit = (module) => {
    if (path.includes(module)) return [...path.slice(path.indexOf(module)), module];
    if (done.has(module)) return null;
    path.push(module);
    for (const next of graph.get(module) ?? []) {
      const found = visit(next);
      if (found) return found;
    }
    path.pop();
    done.add(module);
    return null;
  };
  for (const module of graph.keys()) {
    const found = visit(module);
    if (found) return found;
  }
  return null;
}

const graph = new Map(MODULES.map((module) => [module, importsOf(text(module), module)]));

test("imports are found, and those in comments are not", () => {
  const source = '/** @typedef {import("./a.js").A} A */\nimport {\n  one,\n} from "./b.js";\nimport style from "./style.css";\nexport { two } from "../c.js";\nimport uPlot from "uplot";\nconst late = () => import("./d.js");\n';
  assert.deepEqual(importsOf(source, "x/y/z.js"), ["x/y/b.js", "x/y/style.css", "x/c.js", "x/y/d.js"]);
  assert.ok(graph.get("widgets/js/view.js").includes("widgets/js/head.js"));
});

test("a circle is found", () => {
  assert.deepEqual(circleIn(new Map([["a", ["b"]], ["b", ["c", "d"]], ["c", []], ["d", ["b"]]])), ["b", "d", "b"]);
  assert.equal(circleIn(new Map([["a", ["b", "c"]], ["b", ["c"]], ["c", []]])), null);
});

test("no module imports itself by way of others", () => {
  assert.equal(circleIn(graph), null);
});

test("a room imports from itself and from those before it; the lessons from all but the panels", () => {
  const lessons = ROOMS.filter((room) => !["widgets/js/panels", "widgets/js"].includes(room));
  for (const [module, imported] of graph) {
    const room = dirname(module);
    const allowed = room === "lessons/js" ? lessons : ROOMS.slice(0, ROOMS.indexOf(room) + 1);
    for (const one of imported) assert.ok(allowed.includes(dirname(one)), `${module} imports ${one}`);
  }
});

test("files and folders are of a size that can be looked over", () => {
  for (const module of MODULES) {
    const lines = text(module).split("\n").length - 1;
    assert.ok(lines <= MOST_LINES, `${module} has ${lines} lines`);
  }
  for (const room of ROOMS) {
    const count = MODULES.filter((module) => dirname(module) === room).length;
    assert.ok(count <= MOST_MODULES, `${room} has ${count} modules`);
  }
});

for (const home of ["widgets/js", "lessons/js"]) {
  test(`the head of ${home}/index.js lists every module`, () => {
    const [head] = text(`${home}/index.js`).match(/^\/\*\*[\s\S]*?\*\//);
    // The first word of each line, and the names of its parts: `timeline  the timeline: timeline_controls`.
    const listed = [...head.matchAll(/^ \* {5,}(\w+)|\b(\w+_\w+)\b/gm)].map(([, first, more]) => first ?? more);
    const modules = MODULES.filter((one) => one.startsWith(home) && one !== `${home}/index.js`);
    const names = new Set(modules.flatMap((one) => relative(home, one).replace(/\.js$/, "").split("/")));
    assert.deepEqual(new Set(listed.filter((name) => name !== "states")), names);
  });
}
