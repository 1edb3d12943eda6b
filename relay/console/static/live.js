// Keep what is on the page as the console sees it now, and say so when nothing new comes.
"use strict";
(() => {
  const SILENT_AFTER = 5000; // milliseconds
  const AGAIN_AFTER = 2000;
  const isLive = document.querySelector("main [data-live]") !== null; // the menu alone needs no stream
  const found = isLive ? [...document.querySelectorAll("[data-live]")] : [];
  const parts = new Map(found.map((part) => [part.dataset.live, part]));
  const notice = document.getElementById("no-news");
  let last = Date.now();
  let source = null;

  // A part that is asked for every second, as a job's card.
  const isAsking = () => document.querySelector("[hx-trigger]") !== null;

  function look() {
    const isSilent = (parts.size > 0 || isAsking()) && Date.now() - last > SILENT_AFTER;
    if (isSilent && notice.hidden) {
      notice.querySelector("time").textContent = `${new Date(last).toISOString().slice(11, 19)} UTC`;
    }
    notice.hidden = !isSilent;
    document.body.classList.toggle("stale", isSilent);
  }

  function hear() {
    last = Date.now();
    look();
  }

  function open() {
    close();
    source = new EventSource("/live");
    source.addEventListener("beat", hear);
    for (const [name, part] of parts) {
      source.addEventListener(name, (event) => {
        part.innerHTML = event.data; // the console has escaped what others wrote
        hear();
      });
    }
    source.onerror = () => {
      close();
      askAgain();
    };
  }

  function close() {
    source?.close();
    source = null;
  }

  // An EventSource does not tell why it ended: a session that is over leads to the login.
  async function askAgain() {
    const asked = new AbortController();
    try {
      const answer = await fetch("/live", { signal: asked.signal, cache: "no-store" });
      if (answer.status === 401) {
        location.reload();
        return;
      }
    } catch {
      // the console is away
    } finally {
      asked.abort();
    }
    setTimeout(() => document.hidden || source || open(), AGAIN_AFTER);
  }

  // A hidden page keeps no connection: browsers allow six to a console.
  document.addEventListener("visibilitychange", () => {
    if (parts.size === 0) return;
    if (document.hidden) close();
    else open();
  });
  // What is pressed stays until it is let go: a click on what was replaced meanwhile would be lost.
  let isPressed = false;
  document.addEventListener("pointerdown", () => { isPressed = true; });
  for (const name of ["pointerup", "pointercancel"]) document.addEventListener(name, () => { isPressed = false; });
  document.addEventListener("htmx:beforeSwap", (event) => { if (isPressed) event.detail.shouldSwap = false; });
  document.addEventListener("htmx:afterRequest", (event) => event.detail.successful && hear());
  setInterval(look, 1000);
  if (parts.size > 0 && !document.hidden) open();
})();
