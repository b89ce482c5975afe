// Cards of what parts of the job report: one for each title, for as long as something of that title is reported.

export class Cards {
  #cards = new Map();
  #place;
  #make;

  /**
   * @param place where the cards go
   * @param make called with a title; returns a card, with its `element`, and `update`, which takes all reports of the title
   */
  constructor(place, make) {
    this.#place = place;
    this.#make = make;
  }

  update(reports) {
    const byTitle = new Map();
    for (const report of reports) {
      if (!byTitle.has(report.title)) byTitle.set(report.title, []);
      byTitle.get(report.title).push(report);
    }
    for (const [title, card] of this.#cards) {
      if (!byTitle.has(title)) {
        card.element.remove();
        this.#cards.delete(title);
      }
    }
    for (const [title, ofTitle] of byTitle) {
      if (!this.#cards.has(title)) {
        const made = this.#make(title);
        this.#cards.set(title, made);
        this.#place.append(made.element);
      }
      this.#cards.get(title).update(ofTitle);
    }
  }
}
