// KaTeX, shipped beside this file (see katex/LICENSE.txt), renders the formulas that arithmatex marked.
document.querySelectorAll(".arithmatex").forEach((element) => {
  const text = element.textContent;
  katex.render(text.slice(2, -2), element, { displayMode: text.startsWith("\\["), throwOnError: false });
});
