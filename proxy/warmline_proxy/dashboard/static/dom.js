// Making and updating elements.  Text only ever becomes text: names come from clients, and may be anything.

export const byId = (id) => document.getElementById(id);

/** An element with a class, and children: elements, or texts. */
export function make(tag, className = "", ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...children);
  return element;
}

/** A button that does something when pressed. */
export function button(text, className, act) {
  const element = make("button", className, text);
  element.type = "button";
  element.addEventListener("click", act);
  return element;
}

/** Writes only what changed, so that nothing is announced, laid out or deselected for nothing. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function setAttribute(element, name, value) {
  if (value === null) element.removeAttribute(name);
  else if (element.getAttribute(name) !== String(value)) element.setAttribute(name, String(value));
}

/**
 * Has `parent` show `items` in their order.  Elements stay those of their key, with focus and what is open in them.
 * `create(item)` makes one, `update(element, item, place)` writes what it says.
 */
export function keep(parent, items, keyOf, create, update) {
  const wanted = new Set(items.map((item) => String(keyOf(item))));
  const known = new Map();
  for (const element of [...parent.children]) {
    if (wanted.has(element.dataset.key)) known.set(element.dataset.key, element);
    else element.remove(); // first, so that those that stay need not be moved, which costs the focus
  }
  let before = parent.firstElementChild;
  items.forEach((item, place) => {
    const key = String(keyOf(item));
    const element = known.get(key) ?? create(item);
    element.dataset.key = key;
    update(element, item, place);
    if (element === before) before = before.nextElementSibling;
    else parent.insertBefore(element, before);
  });
}

/** Pairs of name and value as a <dl>'s children, written in place. */
export function describe(list, pairs) {
  keep(
    list,
    pairs,
    ([name]) => name,
    ([name]) => make("div", "", make("dt", "", name), make("dd")),
    (element, [, value, title]) => {
      setText(element.lastChild, value);
      setAttribute(element, "title", title || null);
    },
  );
}

/** Tells people who don't see the page, and those who do for a while. */
export function say(text) {
  byId("said").textContent = text;
  clearTimeout(say.timer);
  say.timer = setTimeout(() => setText(byId("said"), ""), 8000);
}
