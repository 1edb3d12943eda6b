// Keep what is on the page, and its icon, as the console sees it now, and say so when nothing new comes.
"use strict";
(() => {
  const SILENT_AFTER = 5000; // milliseconds
  const AGAIN_AFTER = 2000;
  const { base } = document.body.dataset;
  const hears = "hears" in document.body.dataset;
  const isLive = document.querySelector("main [data-live]") !== null;
  const parts = new Map([...document.querySelectorAll("[data-live]")].map((part) => [part.dataset.live, part]));
  const notice = document.getElementById("no-news");
  const address = `${base}/live${isLive ? "" : "?only_state=true"}`;
  const names = ["state", ...parts.keys()];

  // Browsers allow six connections to a console. So one tab has a stream, and tells the others: the one that was seen
  // last, as browsers may freeze a tab that nobody sees.
  const turn = `stream of ${address}`;
  const others = new BroadcastChannel(turn);
  const latest = new Map();
  const changed = new Set(); // names of what is not yet shown as it is in `latest`
  let isPressed = false;
  let source = null;
  let heard = Date.now();
  let asked = Date.now();

  // A part that is asked for every second, as a job's card.
  const isAsking = () => document.querySelector("[hx-trigger]") !== null;

  function look() {
    const now = Date.now();
    if (hears && now - heard > SILENT_AFTER) showState("unknown");
    const last = isAsking() && !isLive ? asked : heard;
    const isSilent = (isLive || isAsking()) && now - last > SILENT_AFTER;
    if (isSilent && notice.hidden) {
      notice.querySelector("time").textContent = `${new Date(last).toISOString().slice(11, 19)} UTC`;
    }
    notice.hidden = !isSilent;
    document.body.classList.toggle("stale", isSilent);
  }

  function showState(state) {
    const icon = `${base}/icon/${state}.svg`;
    const link = document.querySelector("link[rel=icon]");
    if (link.getAttribute("href") === icon) return;
    link.setAttribute("href", icon);
    const image = document.querySelector(".brand img");
    image.src = icon;
    image.alt = `State: ${state}.`;
  }

  function show(name, text) {
    heard = Date.now();
    if (name === "beat") document.body.dataset.now = text;
    else if (latest.get(name) !== text) {
      latest.set(name, text);
      changed.add(name);
      if (!isPressed) showChanged();
    }
    if (latest.has("state")) showState(latest.get("state"));
    look();
  }

  function showChanged() {
    for (const [name, part] of parts) {
      if (changed.has(name)) part.innerHTML = latest.get(name); // the console has escaped what others wrote
    }
    changed.clear();
  }

  function letGo() {
    isPressed = false;
    setTimeout(showChanged); // the click comes first
  }

  function open() {
    close();
    source = new EventSource(address);
    for (const name of ["beat", ...names]) {
      source.addEventListener(name, (event) => {
        show(name, event.data);
        others.postMessage({ name, text: event.data });
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
    const question = new AbortController();
    try {
      const answer = await fetch(address, { signal: question.signal, cache: "no-store" });
      if (answer.status === 401) {
        others.postMessage({ isOver: true });
        goToLogin();
      }
    } catch {
      // the console is away
    } finally {
      question.abort();
    }
    setTimeout(() => held > 0 && !source && open(), AGAIN_AFTER);
  }

  // A page with a form that is being written stays.
  function goToLogin() {
    if (isLive) location.reload();
  }

  let held = 0; // locks: for a moment two, when this tab takes the turn from itself
  let waiting = null;

  function lead() {
    held += 1;
    open();
    return new Promise(() => {}); // until the tab is gone, or another one takes the turn
  }

  function lose(reason) {
    if (reason === "taken") return;
    held -= 1;
    if (held > 0) return;
    close();
    wait();
  }

  // Until the tab with the turn is gone.
  function wait() {
    waiting = new AbortController();
    navigator.locks.request(turn, { signal: waiting.signal }, lead).catch(lose);
  }

  function take() {
    waiting?.abort("taken");
    navigator.locks.request(turn, { steal: true }, lead).catch(lose);
  }

  function begin() {
    others.onmessage = ({ data }) => {
      if (data.isOver) goToLogin();
      else if (data.isNew) {
        if (held > 0) latest.forEach((text, name) => others.postMessage({ name, text }));
      } else show(data.name, data.text);
    };
    if (document.hidden) {
      wait();
      others.postMessage({ isNew: true });
    } else take();
    document.addEventListener("visibilitychange", () => {
      if (!document.hidden && held === 0) take();
    });
  }

  document.addEventListener("htmx:afterRequest", (event) => {
    if (!event.detail.successful) return;
    asked = Date.now();
    look();
  });
  // What is pressed stays until it is let go: a click on what was replaced meanwhile would be lost.
  // A context menu, and another window, keep the end of the press to themselves.
  document.addEventListener("pointerdown", (event) => { isPressed = event.button === 0; });
  for (const name of ["pointerup", "pointercancel", "contextmenu"]) document.addEventListener(name, letGo);
  window.addEventListener("blur", letGo);
  document.addEventListener("htmx:beforeSwap", (event) => { if (isPressed) event.detail.shouldSwap = false; });
  setInterval(look, 1000);
  if (hears) begin();
})();
