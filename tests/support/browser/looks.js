// Measured in the page, for tests: each returns what is wrong, as texts.

(() => {
  const parse = (color) => {
    const [r, g, b, a = 1] = color.match(/[\d.]+/g).map(Number);
    return [r, g, b, a];
  };
  const over = (top, below) => [0, 1, 2].map((i) => top[i] * top[3] + below[i] * (1 - top[3])).concat(1);
  const luminance = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map((c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const behind = (element) => {
    if (!element) return parse(getComputedStyle(document.body).backgroundColor);
    const own = parse(getComputedStyle(element).backgroundColor);
    return own[3] === 1 ? own : over(own, behind(element.parentElement));
  };
  const shown = (element) =>
    element.checkVisibility({ visibilityProperty: true }) && element.getClientRects().length > 0;
  const name = (element) => `${element.tagName} .${element.className} “${element.textContent.slice(0, 40)}”`;

  window.looks = {
    /** Texts with less contrast than AA wants; disabled controls need none. */
    faint() {
      const own = (element) => [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
      return [...document.querySelectorAll("body *")]
        .filter((each) => own(each) && shown(each) && !each.closest(":disabled, noscript, .spoken, .skip"))
        .map((each) => {
          const style = getComputedStyle(each);
          const size = parseFloat(style.fontSize);
          const wanted = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700) ? 3 : 4.5;
          const paper = behind(each);
          const [a, b] = [luminance(over(parse(style.color), paper)), luminance(paper)];
          const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
          return ratio < wanted ? `${ratio.toFixed(2)} < ${wanted}: ${name(each)}` : "";
        })
        .filter(Boolean);
    },
    /** What is wider than the window, or reaches out of its card. */
    wide() {
      const out = [document.documentElement, ...document.querySelectorAll(".card, dialog[open]")];
      return out.filter((each) => shown(each) && each.scrollWidth > each.clientWidth).map(name);
    },
    /** What can be pressed or written into, and is smaller than 24 pixels. */
    small() {
      return [...document.querySelectorAll("button, input, select, summary, textarea")]
        .filter((each) => shown(each) && each.getBoundingClientRect().height < 23.5)
        .map(name);
    },
    /** What people can operate, in the order in which it stands. */
    operable() {
      const all = document.querySelectorAll("a[href], button, input, select, summary, textarea, [tabindex='0']");
      return [...all].filter((each) => shown(each) && !each.disabled).map(name);
    },
    focused() {
      const element = document.activeElement;
      const target = element.matches('[role="treeitem"]') ? element.firstChild : element;
      return [name(element), getComputedStyle(target).outlineStyle];
    },
  };
})();
