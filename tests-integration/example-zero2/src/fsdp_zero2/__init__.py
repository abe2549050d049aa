"""``strategy="zero2"`` for Lightning. A script needs no import of this package: the name is enough."""
