"""The terms of the actor model as plain data: errors, futures, shapes, settings, what an actor and an endpoint are."""
