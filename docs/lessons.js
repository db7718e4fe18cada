  // The recorded lessons of this page, each in its place. LESSONS, REPLAY and TAPES are above (tools/docs/replays.py).
  const load = (text) => import(URL.createObjectURL(new Blob([text], { type: "text/javascript" })));
  Promise.all([load(LESSONS), load(REPLAY)]).then(([{ default: lessons }, replay]) => {
    for (const el of document.querySelectorAll("[data-lesson]")) {
      const kind = el.dataset.lesson;
      el.replaceChildren();
      lessons.render({ model: replay.model(replay[kind](TAPES[kind])), el });
    }
  });
