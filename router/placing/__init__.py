"""Which pods a request goes to: what pods hold, how long they would take, and the decision for both legs."""
