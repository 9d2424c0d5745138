// Runs before all else, and without modules: says what to do where the keyboard cannot run.

(() => {
  const lacking = [
    ["WebAssembly", typeof WebAssembly === "object"],
    ["DecompressionStream", typeof DecompressionStream === "function"],
    ["findLastIndex", typeof Array.prototype.findLastIndex === "function"],
  ].find(([, here]) => !here);
  const show = (id) => {
    document.documentElement.classList.add("stopped");
    document.getElementById("loading").hidden = true;
    document.getElementById(id).hidden = false;
  };
  if (location.protocol === "file:") show("from-disk");
  else if (lacking) show("too-old");
})();
