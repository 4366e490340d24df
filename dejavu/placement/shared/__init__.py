"""What the members of the family share: the compiled price, orders, lower bounds."""
