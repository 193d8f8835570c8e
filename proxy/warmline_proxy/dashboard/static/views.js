// The page's two views, by the address: the cache, with a request explained (#request=ID), and the chat (#chat).

import { byId, setAttribute, setText } from "./dom.js";

/** `openRequest(id)` explains a request in the view of the cache; `enterChat()` is called when the chat is shown. */
export function startViews(openRequest, enterChat) {
  const follow = () => {
    const isChat = location.hash.startsWith("#chat");
    show(isChat);
    if (isChat) enterChat();
    const request = location.hash.match(/^#request=(.+)/)?.[1];
    if (request) openRequest(request);
  };
  addEventListener("hashchange", follow);
  follow();
}

function show(isChat) {
  document.body.classList.toggle("chatting", isChat);
  byId("cache-view").hidden = isChat;
  byId("chat-view").hidden = !isChat;
  const [toCache, toChat] = document.querySelectorAll(".views a");
  setAttribute(toCache, "aria-current", isChat ? null : "page");
  setAttribute(toChat, "aria-current", isChat ? "page" : null);
  setAttribute(byId("skip"), "href", isChat ? "#chat-text" : "#requests");
  setText(byId("skip"), isChat ? "Skip to the message" : "Skip to the requests");
}
