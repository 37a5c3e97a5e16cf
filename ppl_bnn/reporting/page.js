"use strict";
const root = document.documentElement;
const themes = ["automatic", "light", "dark"];
const toggle = document.getElementById("theme");
toggle.hidden = false;
toggle.addEventListener("click", () => {
  const next = themes[(themes.indexOf(root.dataset.theme || "automatic") + 1) % themes.length];
  if (next === "automatic") delete root.dataset.theme;
  else root.dataset.theme = next;
  toggle.querySelector("span").textContent = next;
});

for (const button of document.querySelectorAll("table.sortable thead button")) {
  button.addEventListener("click", () => {
    const head = button.closest("th");
    const body = button.closest("table").tBodies[0];
    const down = head.getAttribute("aria-sort") === "ascending";
    for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const key = (row) => row.cells[head.cellIndex].dataset.order;
    const compare = (one, two) => {
      const [a, b] = [key(one), key(two)];
      if (a === "" || b === "") return (a === "") - (b === ""); // blanks last, either way
      const difference = a - b;
      const order = Number.isNaN(difference) ? a.localeCompare(b) : difference;
      return down ? -order : order;
    };
    body.append(...[...body.rows].sort(compare));
  });
}

// Paper cannot be clicked: what is folded up there is printed, and folded up again.
let opened = [];
addEventListener("beforeprint", () => {
  opened = [...document.querySelectorAll("details.print:not([open])")];
  for (const each of opened) each.open = true;
});
addEventListener("afterprint", () => {
  for (const each of opened) each.open = false;
});
