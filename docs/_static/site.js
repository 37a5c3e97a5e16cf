document.addEventListener("DOMContentLoaded", () => {
  // The theme opens and closes parts of its navigation by elements without a name, which a screen reader needs.
  for (const summary of document.querySelectorAll("summary")) {
    if (summary.querySelector(".toctree-toggle")) {
      const link = summary.closest("li")?.querySelector("a");
      summary.setAttribute("aria-label", `Pages below ${link ? link.textContent.trim() : "this one"}`);
    }
  }
  // What scrolls by itself has to be reached by the keyboard.
  for (const table of document.querySelectorAll("article table")) {
    if (table.scrollWidth > table.clientWidth) {
      table.tabIndex = 0;
    }
  }
});
