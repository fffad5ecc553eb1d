"""Communication between ranks: groups, collectives, and the transports that carry them."""
