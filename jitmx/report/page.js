"use strict";
for (const button of document.querySelectorAll("th button")) {
  button.addEventListener("click", () => {
    const header = button.closest("th"), body = header.closest("table").tBodies[0];
    const down = header.getAttribute("aria-sort") === "ascending";
    for (const other of header.parentNode.children) other.removeAttribute("aria-sort");
    header.setAttribute("aria-sort", down ? "descending" : "ascending");
    const number = header.classList.contains("number");
    const key = (row) => {
      const cell = row.cells[header.cellIndex], text = cell.textContent.trim();
      if (number) return "value" in cell.dataset ? Number(cell.dataset.value) : null;
      return text === "–" ? null : text;
    };
    const rows = Array.from(body.rows, (row) => [key(row), row]);
    rows.sort(([a], [b]) => {
      if (a === null || b === null) return (a === null) - (b === null);
      const order = number ? a - b : a.localeCompare(b, "en", {numeric: true});
      return down ? -order : order;
    });
    body.append(...rows.map(([, row]) => row));
  });
}
