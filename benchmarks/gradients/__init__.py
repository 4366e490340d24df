"""Rules of combining replicas' gradients, with faulty replicas and with unequal data."""
