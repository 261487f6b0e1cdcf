"use strict";

// the numbers of a token, where a pointer or the keyboard is on it
for (const card of document.querySelectorAll(".card")) {
  const group = card.querySelector(".tokens");
  const readout = card.querySelector(".readout");
  const tokens = [...group.querySelectorAll(".t")];
  const show = (token) => {
    const { r, now, birth } = token.dataset;
    const where = `token ${tokens.indexOf(token) + 1} of ${tokens.length}`;
    readout.textContent = `${where} “${token.textContent}”: ratio ${r} = exp(${now} − (${birth}))`;
  };
  const of = (event) => event.target.closest(".t");
  group.addEventListener("pointerover", (event) => of(event) && show(of(event)));
  group.addEventListener("focusin", (event) => of(event) && show(of(event)));
  group.addEventListener("keydown", (event) => {
    const at = tokens.indexOf(of(event));
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: tokens.length - 1 }[event.key];
    if (at < 0 || to === undefined) return;
    event.preventDefault();
    const next = tokens[to];
    if (!next) return;
    // one stop of the Tab key for all tokens of a rollout
    tokens[at].tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  });
}

// which rollouts are shown
for (const section of document.querySelectorAll(".rollouts")) {
  const row = section.querySelector(".choices");
  const cards = [...section.querySelectorAll(".card")];
  const apply = () => {
    const wanted = [...row.querySelectorAll("select")].filter((select) => select.value !== "");
    for (const card of cards) card.hidden = wanted.some((select) => card.dataset[select.dataset.choice] !== select.value);
    row.querySelector(".shown").textContent = `${cards.filter((card) => !card.hidden).length} shown`;
  };
  row.hidden = false;
  row.addEventListener("change", apply);
  apply();
}

// values of the curves, read off them under a hair line
const minus = (text) => text.replace("-", "−");
const written = (value, range, log) => {
  if (log) return minus(String(Number(value.toPrecision(3))));
  // a curve is no more exact than a fraction of a pixel
  const unit = 10 ** Math.floor(Math.log10(range / 2000));
  return minus(String(Number((Math.round(value / unit) * unit).toPrecision(12))));
};
for (const figure of document.querySelectorAll("figure.chart[tabindex]")) {
  const svg = figure.querySelector("svg[data-x]");
  const axis = (text, log) => {
    const [low, high, start, end] = text.split(" ").map(Number);
    return (pixel) => {
      const share = (pixel - start) / (end - start);
      return log ? 10 ** (Math.log10(low) + share * (Math.log10(high) - Math.log10(low))) : low + share * (high - low);
    };
  };
  const range = (text) => Number(text.split(" ")[1]) - Number(text.split(" ")[0]);
  const x = axis(svg.dataset.x, false);
  const y = axis(svg.dataset.y, "log" in svg.dataset);
  const values = [...figure.querySelectorAll(".legend .value")];
  const where = figure.querySelector(".legend .where");
  const name = figure.querySelector("text.axis").textContent;
  const hair = figure.querySelector(".hair");
  let curves = null;
  let at = null;
  const parse = () => {
    const pair = /[ML](-?[\d.]+) (-?[\d.]+)/g;
    curves ??= [...figure.querySelectorAll("path.curve")].map((path) =>
      [...path.getAttribute("d").matchAll(pair)].map((m) => [Number(m[1]), Number(m[2])]),
    );
    return curves;
  };
  const nearest = (points, pixel) => {
    let low = 0;
    let high = points.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (points[middle][0] < pixel) low = middle;
      else high = middle;
    }
    return pixel - points[low][0] < points[high][0] - pixel ? points[low] : points[high];
  };
  const places = () => [...new Set(parse().flatMap((points) => points.map((point) => point[0])))].sort((a, b) => a - b);
  const read = (pixel) => {
    const found = parse().map((points) => (points.length ? nearest(points, pixel) : null));
    const close = found.filter(Boolean).sort((a, b) => Math.abs(a[0] - pixel) - Math.abs(b[0] - pixel))[0];
    if (!close) return;
    at = close[0];
    hair.setAttribute("x1", at);
    hair.setAttribute("x2", at);
    figure.classList.add("reading");
    // a curve that has no point here says nothing
    found.forEach((point, i) => {
      values[i].textContent = point && Math.abs(point[0] - at) < 0.02 ? written(y(point[1]), range(svg.dataset.y), "log" in svg.dataset) : "";
    });
    where.textContent = `${name} ${written(x(at), range(svg.dataset.x), false)}`;
  };
  const stop = () => {
    figure.classList.remove("reading");
    for (const value of values) value.textContent = "";
    where.textContent = "";
    at = null;
  };
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    read(((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width);
  });
  svg.addEventListener("pointerleave", stop);
  figure.addEventListener("blur", stop);
  figure.addEventListener("keydown", (event) => {
    const all = places();
    const now = at === null ? -1 : all.indexOf(at);
    const stride = event.shiftKey ? 10 : 1;
    const to = { ArrowRight: now + stride, ArrowLeft: now - stride, Home: 0, End: all.length - 1 }[event.key];
    if (to === undefined || !all.length) return;
    event.preventDefault();
    read(all[Math.min(Math.max(to, 0), all.length - 1)]);
  });
}

// paper has no button to open what is folded
addEventListener("beforeprint", () => {
  for (const details of document.querySelectorAll("details")) details.open = true;
});
