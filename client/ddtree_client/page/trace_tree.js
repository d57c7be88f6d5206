"use strict";
// Draws one round's draft tree. Text only ever becomes text nodes.
const Tree = (() => {
  const SVG = "http://www.w3.org/2000/svg";
  const ROW = 30, BOX = 22, GAP = 34, LETTER = 7.6, SMALL = 6.8, MARGIN = 12, LONGEST = 18;

  function shown(text, id) {
    if (text === "" || /^\ufffd+$/.test(text)) return `#${id}`; // a special token, or part of a character
    const visible = text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replace(/^ +| +$/g, (s) => "␣".repeat(s.length));
    return visible.length > LONGEST ? `${visible.slice(0, LONGEST - 1)}…` : visible;
  }

  function percent(probability) {
    const value = probability * 100;
    return `${value >= 10 ? value.toFixed(0) : value >= 1 ? value.toFixed(1) : value.toFixed(2)}%`;
  }

  function element(name, attributes, ...content) {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...content);
    return made;
  }

  // Root, draft nodes and bonus token as one list: the bonus token hangs on the end of the accepted path.
  function entries(round) {
    const path = new Set(round.accepted_path), nodes = round.nodes;
    const all = [{ kind: "root", id: round.root.id, text: round.root.text, parent: -1, depth: 0 }];
    nodes.ids.forEach((id, index) => all.push({
      kind: path.has(index + 1) ? "accepted" : "rejected", id, text: nodes.texts[index],
      parent: nodes.parents[index], depth: nodes.depths[index], probability: nodes.path_probabilities[index],
    }));
    const end = round.accepted_path.at(-1) ?? 0;
    all.push({ kind: "bonus", id: round.bonus.id, text: round.bonus.text, parent: end, depth: all[end].depth + 1 });
    return all;
  }

  // A parent stands on the row of its first child, and the accepted one comes first: its path is the top row.
  function place(all) {
    const order = { bonus: 0, accepted: 1, rejected: 2 };
    all.forEach((each) => { each.children = []; });
    all.slice(1).forEach((each) => all[each.parent].children.push(each));
    let rows = 0;
    const widths = [];
    const visit = (each) => {
      each.label = shown(each.text, each.id);
      each.note = each.kind === "bonus" ? "★" : each.probability === undefined ? "" : percent(each.probability);
      each.width = each.label.length * LETTER + (each.note ? each.note.length * SMALL + 8 : 0) + 14;
      widths[each.depth] = Math.max(widths[each.depth] ?? 0, each.width);
      each.row = rows;
      each.children.sort((a, b) => order[a.kind] - order[b.kind]);
      each.children.forEach((child, index) => { if (index) rows += 1; visit(child); });
    };
    visit(all[0]);
    const columns = [MARGIN];
    widths.forEach((width, depth) => { columns[depth + 1] = columns[depth] + width + GAP; });
    return { columns, height: (rows + 1) * ROW + MARGIN * 2, width: columns[widths.length] - GAP + MARGIN };
  }

  function described(each) {
    const what = { root: "root token", accepted: "accepted", rejected: "rejected", bonus: "bonus token" }[each.kind];
    const odds = each.probability === undefined ? "" : `, path probability ${percent(each.probability)}`;
    return `${JSON.stringify(each.text)} (token ${each.id}), ${what}, depth ${each.depth}${odds}`;
  }

  function draw(round) {
    const all = entries(round), { columns, width, height } = place(all);
    const svg = element("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img" });
    const count = all.length - 2;
    svg.setAttribute("aria-label", `Draft tree of round ${round.round}: ${count} nodes, `
      + `${round.accepted_path.length} accepted, then the bonus token ${JSON.stringify(round.bonus.text)}`);
    const edges = element("g", {}), boxes = element("g", {});
    for (const each of all) {
      const x = columns[each.depth], y = MARGIN + each.row * ROW + ROW / 2;
      if (each.parent >= 0) {
        const from = all[each.parent], fromX = columns[from.depth] + from.width;
        const fromY = MARGIN + from.row * ROW + ROW / 2, middle = (fromX + x) / 2;
        edges.append(element("path", { class: each.kind,
          d: `M${fromX} ${fromY}C${middle} ${fromY} ${middle} ${y} ${x} ${y}` }));
      }
      const group = element("g", { class: each.kind }, element("title", {}, described(each)));
      group.append(element("rect", { x, y: y - BOX / 2, width: each.width, height: BOX, rx: 5 }));
      group.append(element("text", { x: x + 7, y: y + 4.5 }, each.label));
      if (each.note) {
        group.append(element("text", { x: x + each.width - 7, y: y + 4, "text-anchor": "end", class: "probability" },
          each.note));
      }
      boxes.append(group);
    }
    svg.append(edges, boxes);
    return svg;
  }

  return { draw, element, shown };
})();
