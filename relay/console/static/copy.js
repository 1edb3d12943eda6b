// Copy what a button names; without this script the text can be selected.
"use strict";
for (const button of document.querySelectorAll("button[data-copies]")) {
  const words = button.textContent;
  button.hidden = false;
  button.addEventListener("click", async () => {
    const text = document.getElementById(button.dataset.copies);
    try {
      await navigator.clipboard.writeText(text.textContent);
      button.textContent = "Copied";
    } catch {
      // The browser does not let pages copy.
      getSelection().selectAllChildren(text);
      button.textContent = "Selected: copy it by the keyboard";
    }
    setTimeout(() => { button.textContent = words; }, 3000);
  });
}
