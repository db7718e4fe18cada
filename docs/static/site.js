// Lessons and recordings take the theme of the page, which the PyData theme keeps on its root.
addEventListener("DOMContentLoaded", () => {
  const root = document.documentElement;
  const follow = () => {
    const theme = root.dataset.theme === "dark" ? "dark" : "light";
    document.body.dataset.jpThemeLight = String(theme === "light");
    for (const frame of document.querySelectorAll("iframe.recording")) {
      // Only the fragment changes, so that the page in it stays as it is; and no step of the history is made of it.
      frame.contentWindow.location.replace(`${frame.src}#${theme}`);
    }
  };
  follow();
  new MutationObserver(follow).observe(root, { attributes: true, attributeFilter: ["data-theme"] });
});

// Sphinx writes a signature of several lines as definitions without terms, which no list may be.
addEventListener("DOMContentLoaded", () => {
  for (const list of document.querySelectorAll(".sig > dl")) {
    const lines = document.createElement("div");
    lines.className = "sig-lines";
    for (const one of list.children) {
      const line = document.createElement("div");
      line.append(...one.childNodes);
      lines.append(line);
    }
    list.replaceWith(lines);
  }
});
