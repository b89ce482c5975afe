// Figures as people read them.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

/** A size in binary units, in three digits or so: "1.2 GiB". */
export function bytes(count) {
  let size = count;
  let unit = 0;
  while (size >= 1024 && unit < UNITS.length - 1) {
    size /= 1024;
    unit += 1;
  }
  return `${Number.isInteger(size) || unit === 0 ? Math.round(size) : digits(size)} ${UNITS[unit]}`;
}

/** A count, with a thin space between thousands. */
export function count(number) {
  if (!Number.isInteger(number)) return String(Number(number.toPrecision(6)));
  return String(number).replace(/\B(?=(\d{3})+$)/g, "\u2009");
}

/** Something per second. */
export function rate(perSecond) {
  if (perSecond >= 1000) return count(Math.round(perSecond));
  return perSecond === 0 ? "0" : digits(perSecond);
}

/** A span of time in two units at most: "0.4 s", "3 min 5 s". */
export function duration(seconds) {
  if (seconds < 10) return `${Math.max(seconds, 0).toFixed(1)} s`;
  const whole = Math.floor(seconds);
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
}

/** How long a call took, in three digits: "85 µs", "12.3 ms", "4.20 s". */
export function span(seconds) {
  if (seconds < 1e-3) return `${Math.round(seconds * 1e6)} µs`;
  if (seconds < 1) return `${digits(seconds * 1e3)} ms`;
  return seconds < 60 ? `${digits(seconds)} s` : duration(seconds);
}

/** "1 process", "2 processes". */
export function counted(number, one, many = `${one}s`) {
  return `${count(number)} ${number === 1 ? one : many}`;
}

/** The time of day of a moment that is given in seconds, in the reader's own time zone. */
export function clock(at) {
  return new Date(at * 1000).toLocaleTimeString([], { hour12: false });
}

function digits(number) {
  if (number >= 100) return number.toFixed(0);
  return number >= 10 ? number.toFixed(1) : number.toFixed(2);
}
