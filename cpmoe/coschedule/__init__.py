"""Which phase of which slice and layer runs when: schedules as data, their check, and what runs them."""
