// While its run is alive, the page loads itself again; page.js puts it back as it was left.
(() => {
  if (!/^(http|file)/.test(location.protocol)) return;
  const isRead = () => document.hidden || String(getSelection()) || !document.getElementById("tip").hidden;
  setInterval(async () => {
    if (isRead()) return;
    const isServed = location.protocol.startsWith("http");
    try {
      if (isServed && !(await fetch(location.href, { method: "HEAD", cache: "no-store" })).ok) return;
    } catch {
      return; // the server has ended: the page stays as it is
    }
    const parts = [...document.querySelectorAll("details[id], input[id]")];
    const open = parts.filter((part) => part.open || part.checked).map((part) => part.id);
    history.replaceState({ top: scrollY, open }, "");
    location.reload();
  }, 1000 * Number(document.body.dataset.refresh));
})();
