// A question before something that can't be undone.  The browser's own modal dialog keeps the focus in and ends at Esc.

import { byId, setText } from "./dom.js";

/** Resolves to whether it is to be done. */
export function confirm(title, parts, doing) {
  const dialog = byId("dialog");
  setText(byId("dialog-title"), title);
  byId("dialog-text").replaceChildren(...parts);
  setText(byId("dialog-do"), doing);
  return new Promise((resolve) => {
    byId("dialog-do").onclick = () => dialog.close("do");
    byId("dialog-cancel").onclick = () => dialog.close("");
    dialog.onclose = () => resolve(dialog.returnValue === "do");
    dialog.returnValue = "";
    dialog.showModal();
    byId("dialog-cancel").focus();
  });
}
