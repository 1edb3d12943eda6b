// Tell the value of a curve where the pointer is. Without this script a figure has its value and its axis.
"use strict";
(() => {
  let pointer = null; // {x, y}: kept, as the console draws the curves again each second

  function set(element, name, text) {
    if (element.getAttribute(name) !== text) element.setAttribute(name, text);
  }

  function show(plot) {
    const area = plot.querySelector("svg").getBoundingClientRect();
    const { x, y } = pointer ?? {};
    const isOver = pointer !== null && x >= area.left && x <= area.right && y >= area.top && y <= area.bottom;
    let words = "";
    let line = "";
    if (isOver) {
      const span = Number(plot.dataset.span);
      const wanted = (1 - (x - area.left) / area.width) * span;
      const points = plot.dataset.points.split("|").map((each) => {
        const cut = each.indexOf(":");
        return { ago: Number(each.slice(0, cut)), value: each.slice(cut + 1) };
      });
      const found = points.reduce((best, each) => (Math.abs(each.ago - wanted) < Math.abs(best.ago - wanted) ? each : best));
      const end = new Date(document.querySelector(".asof time").dateTime).getTime(); // of the console's clock
      const at = new Date(end - found.ago * 1000).toISOString().slice(11, 19);
      words = `${at} UTC: ${found.value === "-" ? "not known" : found.value}`;
      line = `M${((1 - found.ago / span) * 300).toFixed(1)} 0V56`;
    }
    const readout = plot.querySelector(".readout");
    if (readout.textContent !== words) readout.textContent = words;
    set(plot.querySelector(".cursor"), "d", line);
    plot.classList.toggle("read", isOver);
  }

  const showAll = () => document.querySelectorAll(".plot").forEach(show);
  const note = (event) => {
    pointer = { x: event.clientX, y: event.clientY };
    showAll();
  };
  for (const name of ["pointermove", "pointerdown"]) document.addEventListener(name, note);
  document.documentElement.addEventListener("pointerleave", () => { pointer = null; showAll(); });
  const figures = document.querySelector("[data-live=figures]");
  if (figures) new MutationObserver(showAll).observe(figures, { childList: true });
})();
