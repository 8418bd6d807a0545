"""Who owns which block of the paged cache and which slot of the state pool. No torch here."""
