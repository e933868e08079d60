"""The site that ``ladder report`` writes: a module a page or a kind of page, all of them offline and from records."""
