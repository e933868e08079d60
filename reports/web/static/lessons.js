// What lessons add: the slider's number, and the window of time that a measured timeline shows.
"use strict";
(() => {
  const shown = document.getElementById("stages-shown");
  if (shown) site.onChoice((choices) => { shown.textContent = choices.stages; });

  const figures = [...document.querySelectorAll(".life figure.chart")];
  const slider = document.querySelector("input.from");
  if (!slider) return;
  const longest = Number(slider.max);

  function range(choices) {
    const width = choices.window === "all" ? longest : Number(choices.window);
    const begin = Math.min(Number(choices.from), Math.max(0, longest - width));
    return [begin, begin + width];
  }

  function move() {
    const [begin, end] = range(site.choices);
    for (const figure of figures) {
      const view = site.views.get(figure);
      if (view) view.signal("begin", begin).signal("end", end).runAsync();
    }
  }
  site.onChoice(move);
  // A chart is drawn when it comes into view, and again with other colours.
  const drawn = new MutationObserver(move);
  for (const figure of figures) drawn.observe(figure, { attributes: true, attributeFilter: ["data-drawn"] });

  // Dragging moves the window.
  for (const figure of figures) {
    const place = figure.querySelector(".vega");
    let held = null;
    place.addEventListener("pointerdown", (event) => {
      held = { x: event.clientX, from: range(site.choices)[0] };
      place.setPointerCapture(event.pointerId);
    });
    place.addEventListener("pointermove", (event) => {
      if (!held) return;
      const [begin, end] = range(site.choices);
      const from = held.from - ((event.clientX - held.x) / place.clientWidth) * (end - begin);
      site.choose("from", Math.round(Math.min(longest, Math.max(0, from))));
    });
    for (const name of ["pointerup", "pointercancel"]) place.addEventListener(name, () => { held = null; });
  }
})();
