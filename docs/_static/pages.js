// Lets names break between their words, in tables that are wider than the page. What is copied stays as it is.
document.addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll(".table-wrapper")) {
    if (table.scrollWidth <= table.clientWidth) continue;
    for (const part of table.querySelectorAll("code, code span")) {
      for (const text of [...part.childNodes].filter((node) => node.nodeType === Node.TEXT_NODE)) {
        const words = text.data.split(/(?<=[_,=(/]|\w\.)|(?<=[a-z2])(?=[A-Z])/);
        text.replaceWith(...words.flatMap((word, i) => (i ? [document.createElement("wbr"), word] : [word])));
      }
    }
  }
});
