"use strict";
// Everything essential is there without this script: it adds tooltips, keys, and the choice of two pictures among many.
(() => {
  const tip = document.createElement("div");
  tip.id = "tip";
  tip.setAttribute("role", "status");
  tip.hidden = true;
  document.body.append(tip);

  function element(name, text) {
    const made = document.createElement(name);
    made.textContent = text ?? "";
    return made;
  }

  let target = null;

  function place() {
    const at = target.getClientRects()[0];
    const left = Math.min(Math.max(at.left, 6), innerWidth - tip.offsetWidth - 6);
    const below = at.bottom + 8;
    tip.style.left = `${left}px`;
    tip.style.top = `${below + tip.offsetHeight < innerHeight ? below : at.top - tip.offsetHeight - 8}px`;
  }

  function show(about, parts) {
    target = about;
    tip.replaceChildren(...parts);
    tip.hidden = false;
    place();
  }

  function hide() {
    tip.hidden = true;
  }

  // Points of charts: their native tooltips become ours, which a tap shows too.
  for (const title of document.querySelectorAll("svg title")) {
    title.parentNode.dataset.tip = title.textContent;
    title.remove();
  }

  function chosenBlock(routing) {
    return routing.dataset.slots.split(",").findIndex((slot) => document.getElementById(`block-${slot}`).checked);
  }

  function weights(token) {
    const { experts, colours } = token.closest(".cell").dataset;
    const shown = token.dataset.w.split(";")[chosenBlock(token.closest(".routing"))].split(",");
    return experts.split("|").map((name, k) => {
      const row = document.createElement("div");
      const bar = element("i");
      bar.style.background = colours.split("|")[k];
      bar.style.width = `${shown[k] / 10}%`;
      row.append(element("span", name), bar, element("span", `${(shown[k] / 10).toFixed(1)} %`));
      return row;
    });
  }

  function about(at) {
    const token = at.closest?.(".text .t");
    if (token) return show(token, [element("b", `“${token.textContent.replaceAll("\n", "")}”`), ...weights(token)]);
    const point = at.closest?.("[data-tip]");
    return point ? show(point, [element("span", point.dataset.tip)]) : hide();
  }

  document.addEventListener("pointerover", (event) => about(event.target));
  document.addEventListener("pointerdown", (event) => about(event.target));
  document.addEventListener("focusin", (event) => about(event.target));
  document.addEventListener("focusout", hide);
  document.addEventListener("scroll", () => tip.hidden || place(), true);
  document.addEventListener("keydown", (event) => event.key === "Escape" && hide());

  // A text is one stop of the Tab key; arrows go from token to token.
  for (const text of document.querySelectorAll(".routing .text")) {
    const tokens = [...text.children];
    tokens.forEach((token, k) => (token.tabIndex = k ? -1 : 0));
    text.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      const next = tokens[tokens.indexOf(document.activeElement) + step];
      if (!next) return;
      event.preventDefault();
      document.activeElement.tabIndex = -1;
      next.tabIndex = 0;
      next.focus({ preventScroll: false });
    });
  }

  // With many clients, or in a narrow window: one model, on its own text and on another.
  const narrow = matchMedia("(max-width: 700px)");
  for (const routing of document.querySelectorAll(".routing")) {
    const [model, text] = routing.querySelectorAll("select");
    if (text.options.length > 1) text.selectedIndex = 1;
    const choose = () => {
      const single = routing.classList.contains("many") || narrow.matches;
      routing.classList.toggle("single", single);
      routing.querySelector(".choices").hidden = !single;
      for (const cell of routing.querySelectorAll(".cell")) {
        const wanted = cell.dataset.text === text.value || cell.dataset.text === model.value;
        cell.classList.toggle("chosen", cell.dataset.model === model.value && wanted);
      }
    };
    for (const changed of [model, text, narrow]) changed.addEventListener("change", choose);
    choose();
  }
})();
