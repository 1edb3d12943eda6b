// Add to each moment of the page how long ago it was, and the local time. Without this script UTC stays.
"use strict";
(() => {
  const UNITS = [[86_400, "d"], [3_600, "h"], [60, "min"]];
  const FARTHEST = 1000 * 86_400; // seconds; an age of years says nothing
  const zone = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", timeZoneName: "short" });
  const day = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short" });
  const whole = new Intl.DateTimeFormat("en-GB", { dateStyle: "full", timeStyle: "long" });
  let ahead = -Infinity; // milliseconds: the console's clock less the browser's, which may be wrong

  // A time that the console sends is past when it comes: the one that took the least is the best, the others say less.
  function compare() {
    ahead = Math.max(ahead, new Date(document.body.dataset.now).getTime() - Date.now());
  }

  function length(seconds) {
    const [size, unit] = UNITS.find(([each]) => seconds >= 2 * each) ?? [1, "s"];
    return `${Math.floor(seconds / size)} ${unit}`;
  }

  function age(at) {
    const seconds = Math.round((Date.now() + ahead - at) / 1000);
    if (Math.abs(seconds) > FARTHEST) return "";
    if (seconds === 0 || seconds === -1) return "now";
    return seconds > 0 ? `${length(seconds)} ago` : `in ${length(-seconds)}`;
  }

  function local(at) {
    const offset = at.getTimezoneOffset();
    if (offset === 0) return "";
    const isOtherDay = new Date(at.getTime() - offset * 60_000).getUTCDate() !== at.getUTCDate();
    return (isOtherDay ? `${day.format(at)} ` : "") + zone.format(at);
  }

  function show(time) {
    const at = new Date(time.dateTime);
    if (Number.isNaN(at.getTime())) return;
    const text = [age(at), local(at)].filter(Boolean).join(", ");
    let note = time.nextElementSibling;
    if (!note?.matches(".ago")) {
      if (!text) return;
      note = document.createElement("small");
      note.className = "ago";
      note.ariaLive = "off"; // it changes each second, also inside a status
      time.after(" ", note);
      time.title = whole.format(at);
    }
    if (note.textContent !== text) note.textContent = text;
  }

  function showAll() {
    compare();
    document.querySelectorAll("time[datetime]").forEach(show);
  }

  new MutationObserver(showAll).observe(document.body, { childList: true, subtree: true });
  setInterval(showAll, 1000);
  showAll();
})();
