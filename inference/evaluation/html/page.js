"use strict";
// Hover values of the charts, and the drafted tree of a step. Without scripts charts have their titles, and no trees.
(() => {
  document.documentElement.classList.add("scripted");
  const SVG = "http://www.w3.org/2000/svg";
  const make = (name, attributes, text) => {
    const element = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (text !== undefined) element.textContent = text;
    return element;
  };

  // --- hover values -------------------------------------------------------------------------------------------------

  const tip = document.createElement("div");
  tip.id = "tip";
  tip.hidden = true;
  document.body.append(tip);
  for (const title of document.querySelectorAll("svg.chart title")) {
    title.parentNode.dataset.tip = title.textContent;
    title.parentNode.setAttribute("aria-label", title.textContent);
    title.remove(); // or the browser shows its own tooltip, too
  }
  const show = (event) => {
    const marked = event.target.closest ? event.target.closest("[data-tip]") : null;
    tip.hidden = !marked;
    if (!marked) return;
    tip.textContent = marked.dataset.tip;
    const width = document.documentElement.clientWidth;
    const left = Math.max(4, Math.min(event.pageX + 12, scrollX + width - tip.offsetWidth - 8));
    tip.style.left = `${left}px`;
    tip.style.top = `${Math.max(0, event.pageY - tip.offsetHeight - 10)}px`;
  };
  for (const kind of ["pointermove", "pointerdown"]) document.addEventListener(kind, show);
  document.addEventListener("pointerleave", () => { tip.hidden = true; });

  // --- trees --------------------------------------------------------------------------------------------------------

  const data = document.getElementById("samples");
  const samples = data ? JSON.parse(data.textContent) : [];
  const colours = data ? JSON.parse(data.dataset.colours) : {};
  const visible = (text) => text.replace(/ /g, "␣").replace(/\n/g, "⏎").replace(/\t/g, "⇥") || "◌";
  const cut = (text) => { const all = [...visible(text)]; return all.length > 14 ? `${all.slice(0, 13).join("")}…` : all.join(""); };
  const colour = (sample, source) => `c${colours[sample.source_names[source]] ?? 0}`;

  // Leaves take one row each, in order; a parent stands beside its first child. Columns are depths.
  function layout(tree) {
    const children = new Map([[-1, []]]);
    tree.parents.forEach((parent, node) => { children.set(node, []); children.get(parent).push(node); });
    const places = new Map();
    let rows = 0;
    const place = (node, depth) => {
      const below = children.get(node), row = rows;
      below.forEach((child) => place(child, depth + 1));
      if (!below.length) rows += 1;
      places.set(node, { row, depth });
    };
    place(-1, 0);
    return { places, rows };
  }

  function draw(sample, tree, before) {
    const { places, rows } = layout(tree), names = new Map([[-1, cut(before)]]);
    tree.texts.forEach((text, node) => names.set(node, cut(text)));
    const widths = [];
    for (const [node, { depth }] of places) widths[depth] = Math.max(widths[depth] || 0, 8 * [...names.get(node)].length + 12);
    const starts = widths.map((_, depth) => 2 + widths.slice(0, depth).reduce((sum, width) => sum + width + 22, 0));
    const x = (node) => starts[places.get(node).depth], y = (node) => 4 + 24 * places.get(node).row;
    const width = starts[starts.length - 1] + widths[widths.length - 1] + 4, height = 24 * rows + 6;
    const picture = make("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img" });
    picture.setAttribute("aria-label", `${tree.parents.length} drafted tokens, ${tree.accepted.length} accepted`);
    const accepted = new Set(tree.accepted);
    const size = (node) => 8 * [...names.get(node)].length + 10;
    tree.parents.forEach((parent, node) => {
      const from = x(parent) + size(parent), middle = x(node) - 10;
      const path = `M${from} ${y(parent) + 9}H${middle}V${y(node) + 9}H${x(node)}`;
      picture.append(make("path", { d: path, class: accepted.has(node) ? "edge accepted" : "edge" }));
    });
    for (const node of places.keys()) {
      const kind = node < 0 ? "node base" : `node ${colour(sample, tree.sources[node])}${accepted.has(node) ? " accepted" : ""}`;
      picture.append(make("rect", { x: x(node), y: y(node), width: size(node), height: 18, rx: 3, class: kind }));
      picture.append(make("text", { x: x(node) + 5, y: y(node) + 13 }, names.get(node)));
    }
    return picture;
  }

  function select(article, sample, step) {
    const steps = [...article.querySelectorAll(".step")], panel = article.querySelector(".tree");
    steps.forEach((one, index) => {
      one.setAttribute("aria-pressed", String(index === step));
      one.tabIndex = index === step ? 0 : -1;
    });
    const start = sample.accept_lengths.slice(0, step).reduce((sum, length) => sum + length, 0);
    const tree = sample.trees && sample.trees[step], line = document.createElement("p");
    const count = sample.sources.slice(start, start + sample.accept_lengths[step]).filter((source) => source >= 0).length;
    const said = `Step ${step + 1} of ${steps.length}: `;
    panel.replaceChildren(line);
    if (step === 0 && !count) line.textContent = `${said}the prefill, which gives one token.`;
    else if (!tree) line.textContent = `${said}${count} drafted tokens accepted; its tree was not recorded.`;
    else if (!tree.parents.length) line.textContent = `${said}nothing was drafted.`;
    else {
      line.textContent = `${said}${count} of ${tree.parents.length} drafted tokens accepted (thick frame).`;
      const box = document.createElement("div");
      box.className = "scroll";
      box.tabIndex = 0;
      box.append(draw(sample, tree, sample.texts[start - 1] ?? ""));
      panel.append(box);
    }
    panel.hidden = false;
  }

  document.querySelectorAll("article.sample").forEach((article) => {
    const sample = samples[Number(article.dataset.sample)];
    article.querySelectorAll(".step").forEach((element, step, all) => {
      element.setAttribute("role", "button");
      element.setAttribute("aria-pressed", "false");
      element.tabIndex = step ? -1 : 0;
      element.addEventListener("click", () => select(article, sample, step));
      element.addEventListener("keydown", (event) => {
        const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
        if (event.key === "Enter" || event.key === " ") select(article, sample, step);
        else if (move && all[step + move]) { select(article, sample, step + move); all[step + move].focus(); }
        else return;
        event.preventDefault();
      });
    });
  });
})();
