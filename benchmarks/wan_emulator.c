// A wide-area link between two network namespaces, in user space: a TUN device in each, and between them for each
// direction a bottleneck of a given rate with a drop-tail queue, a delay, and random loss.
//
// The kernel hands over TCP segments of up to 64 KiB (segmentation offload), which cross as such: rate and queue count
// the bytes of all the packets they stand for, with headers and 38 bytes of Ethernet framing each. Where packets are
// lost, they are cut, so loss is one packet's. Only IPv4 crosses: what a kernel asks its IPv6 neighbours is dropped and
// not counted. Settings and counters are in a file that both sides map (struct direction, twice); wan_link.py knows its
// layout.
//
// usage: wan_emulator NAMESPACE ADDRESS NAMESPACE ADDRESS MTU CONTROL_FILE      prints "ready", ends with its stdin
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <linux/virtio_net.h>
#include <poll.h>
#include <sched.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { FRAME = 66000, SLOTS = 1 << 16, BATCH = 64, FRAMING = 38, HEADER = sizeof(struct virtio_net_hdr) };

struct direction {
  // Set by the other side at any time.
  double rate, delay, loss, queue;  // bytes/s, s, share of packets, bytes
  uint64_t cut, no_syn;             // drop everything; drop what opens a connection
  uint64_t only_udp;                // if not 0: drop and count as refused all but UDP from or to this port
  // Counted here.
  uint64_t bytes, packets, lost, overflowed, largest_backlog;  // bytes as on the wire, without framing
  uint64_t refused;
};

struct packet {
  double due;
  uint32_t length;
  uint8_t *data;
};

struct pipe_end {
  int in, out;
  struct direction *shared;
  struct packet *queue;
  uint32_t head, tail;
  double free_at;  // when the bottleneck has sent all that is queued
};

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec + time.tv_nsec * 1e-9;
}

static void fail(const char *what) {
  perror(what);
  exit(1);
}

static double random_share(void) {
  static uint64_t state = 88172645463325252ull;
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return (state >> 11) * 0x1p-53;
}

// ---- frames ---------------------------------------------------------------------------------------------------------

static uint8_t *spare[2 * SLOTS];
static int spares;

static uint8_t *get_frame(void) {
  uint8_t *frame = spares ? spare[--spares] : malloc(FRAME);
  if (!frame) fail("malloc");
  return frame;
}

static void put_frame(uint8_t *frame) {
  if (spares < 2 * SLOTS)
    spare[spares++] = frame;
  else
    free(frame);
}

// The parts of a frame: a virtio header, then IPv4, and for TCP its header and payload in segments of at most `size`.
struct view {
  struct virtio_net_hdr *offload;
  uint8_t *ip, *tcp;  // tcp: NULL for other protocols
  int ip_header, headers, payload, size, packets;
};

static struct view view_of(uint8_t *frame, int length) {
  struct view view = {.offload = (void *)frame, .ip = frame + HEADER, .packets = 1};
  view.ip_header = (view.ip[0] & 15) * 4;
  view.headers = view.ip_header;
  if (view.ip[0] >> 4 == 4 && view.ip[9] == IPPROTO_TCP) {
    view.tcp = view.ip + view.ip_header;
    view.headers += (view.tcp[12] >> 4) * 4;
  }
  view.payload = length - HEADER - view.headers;
  view.size = view.payload;
  if (view.tcp && view.offload->gso_type != VIRTIO_NET_HDR_GSO_NONE && view.offload->gso_size) {
    view.size = view.offload->gso_size;
    view.packets = (view.payload + view.size - 1) / view.size;
  }
  return view;
}

static bool opens_connection(const struct view *view) { return view->tcp && (view->tcp[13] & 0x12) == 0x02; }

static bool is_udp_of(const struct view *view, uint64_t port) {
  const uint8_t *udp = view->ip + view->ip_header;
  bool is_udp = view->ip[0] >> 4 == 4 && view->ip[9] == IPPROTO_UDP && view->payload >= 8;
  return is_udp && ((udp[0] << 8 | udp[1]) == (int)port || (udp[2] << 8 | udp[3]) == (int)port);
}

static uint32_t add_words(const uint8_t *bytes, int length, uint32_t sum) {
  for (int i = 0; i + 1 < length; i += 2) sum += bytes[i] << 8 | bytes[i + 1];
  return sum;
}

static void store_sum(uint8_t *at, uint32_t sum, bool complement) {
  while (sum >> 16) sum = (sum & 0xffff) + (sum >> 16);
  if (complement) sum = ~sum;
  at[0] = sum >> 8;
  at[1] = sum;
}

// ---- the bottleneck -------------------------------------------------------------------------------------------------

static void enqueue_part(struct pipe_end *end, uint8_t *frame, const struct view *view, int from, int to, double time);

// Takes over the frame. Of one that does not fit, queues the first packets that do.
static void enqueue(struct pipe_end *end, uint8_t *frame, int length, double time) {
  struct direction *shared = end->shared;
  struct view view = view_of(frame, length);
  uint64_t bytes = (uint64_t)view.packets * view.headers + view.payload;
  double wire = bytes + (double)view.packets * FRAMING;
  double start = end->free_at > time ? end->free_at : time;
  double backlog = (start - time) * shared->rate;
  if (backlog + wire > shared->queue || end->tail - end->head >= SLOTS) {
    int fitting = (shared->queue - backlog) / (view.headers + view.size + FRAMING);
    if (fitting < 0 || fitting >= view.packets || end->tail - end->head >= SLOTS) fitting = 0;
    shared->overflowed += view.packets - fitting;
    if (fitting) enqueue_part(end, frame, &view, 0, fitting, time);
    put_frame(frame);
    return;
  }
  if (backlog + wire > shared->largest_backlog) shared->largest_backlog = backlog + wire;
  end->free_at = start + wire / shared->rate;
  end->queue[end->tail++ % SLOTS] = (struct packet){end->free_at + shared->delay, length, frame};
  shared->bytes += bytes;
  shared->packets += view.packets;
}

// Enqueues segments [from, to) of a frame, which it leaves alone, as a frame of their own.
static void enqueue_part(struct pipe_end *end, uint8_t *frame, const struct view *view, int from, int to, double time) {
  int start = from * view->size, stop = to * view->size < view->payload ? to * view->size : view->payload;
  int total = view->headers + stop - start;
  uint8_t *part = get_frame();
  memcpy(part, frame, HEADER + view->headers);
  memcpy(part + HEADER + view->headers, view->ip + view->headers + start, stop - start);
  struct view made = view_of(part, HEADER + total);
  uint32_t sequence;
  memcpy(&sequence, view->tcp + 4, 4);
  sequence = htonl(ntohl(sequence) + start);
  memcpy(made.tcp + 4, &sequence, 4);
  if (stop < view->payload) made.tcp[13] &= ~(0x01 | 0x08);  // FIN and PSH belong to the last
  uint16_t id = (view->ip[4] << 8 | view->ip[5]) + from;
  made.ip[2] = total >> 8, made.ip[3] = total, made.ip[4] = id >> 8, made.ip[5] = id, made.ip[10] = made.ip[11] = 0;
  store_sum(made.ip + 10, add_words(made.ip, made.ip_header, 0), true);
  if (stop - start <= view->size) made.offload->gso_type = VIRTIO_NET_HDR_GSO_NONE, made.offload->gso_size = 0;
  // The receiver's kernel completes the sum over the pseudo header.
  store_sum(made.tcp + 16, add_words(made.ip + 12, 8, IPPROTO_TCP + total - made.ip_header), false);
  made.offload->flags = VIRTIO_NET_HDR_F_NEEDS_CSUM;
  made.offload->csum_start = made.ip_header;
  made.offload->csum_offset = 16;
  enqueue(end, part, HEADER + total, time);
}

// Takes over the frame: drops it, or packets of it, and queues the rest.
static void transmit(struct pipe_end *end, uint8_t *frame, int length, double time) {
  struct direction *shared = end->shared;
  struct view view = view_of(frame, length);
  if (shared->cut || (shared->no_syn && opens_connection(&view))) {
    shared->lost += view.packets;
    put_frame(frame);
    return;
  }
  if (shared->only_udp && !is_udp_of(&view, shared->only_udp)) {
    shared->refused += view.packets;
    put_frame(frame);
    return;
  }
  if (shared->loss <= 0) {
    enqueue(end, frame, length, time);
    return;
  }
  int from = 0;  // the first segment since the last lost one
  for (int i = 0; i < view.packets; i++) {
    if (random_share() >= shared->loss) continue;
    shared->lost++;
    if (i > from) enqueue_part(end, frame, &view, from, i, time);
    from = i + 1;
  }
  if (from == 0) {
    enqueue(end, frame, length, time);
    return;
  }
  if (from < view.packets) enqueue_part(end, frame, &view, from, view.packets, time);
  put_frame(frame);
}

// ---- devices and the loop -------------------------------------------------------------------------------------------

static int open_tun(const char *space, const char *address, int mtu) {
  char text[512];
  snprintf(text, sizeof text, "/var/run/netns/%s", space);
  int file = open(text, O_RDONLY);
  if (file < 0 || setns(file, CLONE_NEWNET)) fail(text);
  close(file);
  int tun = open("/dev/net/tun", O_RDWR | O_NONBLOCK);
  struct ifreq request = {.ifr_flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR};
  strcpy(request.ifr_name, "wan0");
  int header = HEADER;
  if (tun < 0 || ioctl(tun, TUNSETIFF, &request) || ioctl(tun, TUNSETVNETHDRSZ, &header) ||
      ioctl(tun, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4))
    fail("/dev/net/tun");
  int socket_ = socket(AF_INET, SOCK_DGRAM, 0);
  struct sockaddr_in *inet = (void *)&request.ifr_addr;
  *inet = (struct sockaddr_in){.sin_family = AF_INET};
  if (inet_pton(AF_INET, address, &inet->sin_addr) != 1 || ioctl(socket_, SIOCSIFADDR, &request)) fail(address);
  inet_pton(AF_INET, "255.255.255.0", &inet->sin_addr);
  if (ioctl(socket_, SIOCSIFNETMASK, &request)) fail("netmask");
  request.ifr_mtu = mtu;
  if (ioctl(socket_, SIOCSIFMTU, &request)) fail("mtu");
  request.ifr_qlen = 10000;  // nothing is lost before the bottleneck
  if (ioctl(socket_, SIOCSIFTXQLEN, &request)) fail("txqueuelen");
  request.ifr_flags = IFF_UP | IFF_RUNNING;
  if (ioctl(socket_, SIOCSIFFLAGS, &request)) fail("up");
  close(socket_);
  return tun;
}

static bool take_in(struct pipe_end *end) {
  for (int count = 0; count < BATCH; count++) {
    uint8_t *frame = get_frame();
    ssize_t length = read(end->in, frame, FRAME);
    if (length <= (ssize_t)HEADER) {
      put_frame(frame);
      return count > 0;
    }
    if (frame[HEADER] >> 4 == 4)
      transmit(end, frame, length, now());
    else
      put_frame(frame);
  }
  return true;
}

// Delivers what is due; lowers *next to when the next one will be.
static bool deliver(struct pipe_end *end, double *next) {
  double time = now();
  for (int count = 0; count < BATCH; count++) {
    if (end->head == end->tail) return count > 0;
    struct packet *packet = &end->queue[end->head % SLOTS];
    if (packet->due > time) {
      if (packet->due < *next) *next = packet->due;
      return count > 0;
    }
    if (write(end->out, packet->data, packet->length) < 0 && errno == EAGAIN) {
      *next = time;
      return count > 0;
    }
    put_frame(packet->data);
    end->head++;
  }
  return true;
}

int main(int count, char **words) {
  if (count != 7) {
    fprintf(stderr, "usage: %s NAMESPACE ADDRESS NAMESPACE ADDRESS MTU CONTROL_FILE\n", words[0]);
    return 2;
  }
  int file = open(words[6], O_RDWR);
  struct direction *shared = mmap(NULL, 2 * sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (file < 0 || shared == MAP_FAILED) fail(words[6]);
  int tuns[2];
  for (int i = 0; i < 2; i++) tuns[i] = open_tun(words[1 + 2 * i], words[2 + 2 * i], atoi(words[5]));
  struct pipe_end ends[2];
  for (int i = 0; i < 2; i++)
    ends[i] = (struct pipe_end){tuns[i], tuns[1 - i], &shared[i], calloc(SLOTS, sizeof(struct packet)), 0, 0, 0};
  printf("ready\n");
  fflush(stdout);
  struct pollfd polled[] = {{tuns[0], POLLIN, 0}, {tuns[1], POLLIN, 0}, {STDIN_FILENO, POLLIN, 0}};
  while (!polled[2].revents) {
    double next = now() + 0.05;
    bool busy = false;
    for (int i = 0; i < 2; i++) {
      busy |= take_in(&ends[i]);
      busy |= deliver(&ends[i], &next);
    }
    double wait = busy ? 0 : next - now();
    struct timespec time = {0, wait > 0 ? (long)(wait * 1e9) : 0};
    ppoll(polled, 3, &time, NULL);
  }
  return 0;
}
