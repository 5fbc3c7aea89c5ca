//! Networks of ranks that are threads, over the loopback interface.

use std::net::Ipv4Addr;

use super::*;

pub(super) fn networks(size: usize, key: &JobKey, peer_timeout: Duration) -> Vec<Arc<Network>> {
    let localhost = IpAddr::from(Ipv4Addr::LOCALHOST);
    let listeners: Vec<_> = (0..size).map(|_| listen(localhost).expect("there are ports")).collect();
    let book: Vec<SocketAddr> = listeners.iter().map(|(_, address)| address.seen_from(localhost)).collect();
    let start = |(rank, (listener, _))| {
        let (book, monitor, key) = (book.clone(), Arc::new(Monitor::new(rank)), key.clone());
        Network::start(listener, Options { rank, session: 7, key, book, monitor, peer_timeout }).expect("it starts")
    };
    listeners.into_iter().enumerate().map(start).collect()
}
