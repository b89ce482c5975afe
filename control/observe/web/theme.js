// Dark or light, as the reader has chosen on this browser; before anything is drawn. Without a choice: as the system has it.
try {
  const theme = localStorage.getItem("skipper-theme");
  if (theme === "dark" || theme === "light") document.documentElement.dataset.theme = theme;
} catch {
  // This browser keeps nothing.
}
