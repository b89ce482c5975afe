"""The messages between the clients and the controller of a store. Neither side imports the other."""
