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
    if (at.closest?.("svg.heat")) return;
    const point = at.closest?.("[data-tip]");
    return point ? show(point, [element("span", point.dataset.tip)]) : hide();
  }

  document.addEventListener("pointerover", (event) => about(event.target));
  document.addEventListener("pointerdown", (event) => about(event.target));
  document.addEventListener("focusin", (event) => about(event.target));
  document.addEventListener("focusout", hide);
  document.addEventListener("scroll", () => tip.hidden || place(), true);
  document.addEventListener("keydown", (event) => event.key === "Escape" && hide());

  // Heat maps: the value of the field under the pointer or, by arrow keys, under the cursor; and a slider through training.
  const LEVELS = 10;
  const keys = { ArrowRight: [0, 1], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowUp: [-1, 0] };

  function painter(map) {
    const [rows, columns, stages] = ["rows", "columns", "stages"].map((name) => JSON.parse(map.dataset[name]));
    const { top, told, digits } = map.dataset;
    const fields = map.querySelector(".fields");
    const cursor = map.querySelector(".cursor");
    const masked = (i, j) => "masked" in map.dataset && i === j;
    let row = 0, column = masked(0, 0) ? 1 : 0, shown = stages.length - 1;

    const share = (i, j) => parseInt(stages[shown][1].substr(2 * (i * columns.length + j), 2), 16) / 255;

    function point(i, j) {
      if (masked(i, j) || Math.min(i, j) < 0 || i >= rows.length || j >= columns.length) return;
      [row, column] = [i, j];
      cursor.setAttribute("x", j);
      cursor.setAttribute("y", i);
      cursor.setAttribute("visibility", "visible");
      const parts = { row: rows[i], column: columns[j], value: (share(i, j) * top).toFixed(digits) };
      show(cursor, [element("span", told.replace(/{(\w+)}/g, (_, part) => parts[part]))]);
    }

    function leave() {
      cursor.setAttribute("visibility", "hidden");
      hide();
    }

    function under(event) {
      const box = fields.getBoundingClientRect();
      const [down, across] = [(event.clientY - box.top) / box.height, (event.clientX - box.left) / box.width];
      point(Math.floor(down * rows.length), Math.floor(across * columns.length));
    }

    function paint(moment) {
      shown = Math.max(0, stages.findLastIndex(([at]) => at <= moment));
      const pieces = Array.from({ length: LEVELS + 1 }, () => "");
      for (let i = 0; i < rows.length; i++)
        for (let j = 0; j < columns.length; j++) if (!masked(i, j)) pieces[Math.round(LEVELS * share(i, j))] += `M${j} ${i}h1v1h-1z`;
      pieces.forEach((d, k) => map.querySelector(`.w${k}`).setAttribute("d", d));
    }

    map.tabIndex = 0;
    for (const kind of ["pointermove", "pointerdown"]) fields.addEventListener(kind, under);
    fields.addEventListener("pointerleave", leave);
    map.addEventListener("focus", () => map.matches(":focus-visible") && point(row, column));
    map.addEventListener("blur", leave);
    map.addEventListener("keydown", (event) => {
      const step = keys[event.key];
      if (!step) return;
      event.preventDefault();
      const [i, j] = [row + step[0], column + step[1]];
      masked(i, j) ? point(i + step[0], j + step[1]) : point(i, j);
    });
    return paint;
  }

  const painters = new Map([...document.querySelectorAll("svg.heat")].map((map) => [map, painter(map)]));
  for (const slider of document.querySelectorAll("input.stage")) {
    const moments = JSON.parse(slider.dataset.moments);
    const moving = slider.closest(".staged").querySelectorAll(".moving");
    slider.parentNode.hidden = moments.length < 2;
    const move = () => {
      const moment = moments[slider.value];
      const text = moment.toLocaleString("en");
      slider.nextElementSibling.textContent = text;
      slider.setAttribute("aria-valuetext", `${text} ${slider.dataset.unit}`);
      for (const map of moving) painters.get(map)(moment);
    };
    slider.addEventListener("input", move);
    move();
  }

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
  if (narrow.matches) for (const some of document.querySelectorAll("details.narrow")) some.open = false;
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
