"""What a run came to, for people: pictures of it, and one HTML page that holds them."""
