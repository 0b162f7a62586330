"""The web page of the router: HTML, styles and scripts in static/, as they are sent."""
